"""Says where each published tensor goes, in terms of layers and experts rather than of module trees."""

from collections.abc import Callable

import numpy as np

from jaxhybrid.checkpoint.fill import WeightRule
from jaxhybrid.config import DenseSpec, LayerSpec, ModelConfig, MoeSpec
from jaxhybrid.layers.decoder import Execution
from jaxhybrid.layers.segments import plan_segments

Convert = Callable[[np.ndarray], np.ndarray]


class WeightTable:
    """Collects rules; `layers[l]` and `mtp[i]` are the places of a decoder's layers under one Execution."""

    def __init__(self, config: ModelConfig, execution: Execution) -> None:
        self.rules: list[WeightRule] = []
        self.execution = execution
        self.hidden = config.hidden_size
        self.layers: list[LayerPlace] = []
        for number, plan in enumerate(plan_segments(config.layers, execution.scan_layers)):
            for repeat in range(plan.repeats):
                for place, spec in enumerate(plan.pattern):
                    index = (repeat,) if plan.repeats > 1 else ()
                    self.layers.append(LayerPlace(self, spec, ("segments", number, "layers", place), index))
        self.mtp = [LayerPlace(self, spec, ("mtp", i, "layer"), ()) for i, spec in enumerate(config.mtp_layers)]

    def add(
        self,
        name: str,
        path: tuple[str | int, ...],
        index: tuple[int, ...] = (),
        shape: tuple[int, ...] | None = None,
        convert: Convert | None = None,
    ) -> None:
        self.rules.append(WeightRule(name, path, index, shape, convert))


class LayerPlace:
    """One layer of the table: adds rules relative to it."""

    def __init__(
        self, table: WeightTable, spec: LayerSpec, path: tuple[str | int, ...], index: tuple[int, ...]
    ) -> None:
        self.table, self.spec, self.path, self.index = table, spec, path, index
        self.hidden = table.hidden

    def add(
        self,
        name: str,
        *path: str | int,
        index: tuple[int, ...] = (),
        shape: tuple[int, ...] | None = None,
        convert: Convert | None = None,
    ) -> None:
        self.table.add(name, (*self.path, *path), (*self.index, *index), shape, convert)

    def norms(self, prefix: str) -> None:
        for norm in ("input_layernorm", "post_attention_layernorm"):
            self.add(f"{prefix}.{norm}.weight", norm, "weight")

    def dense(self, prefix: str, *path: str) -> None:
        """`{prefix}.{gate,up,down}_proj.weight` into a Dense at `path`."""
        for place, part in enumerate(("gate", "up")):
            self.add(f"{prefix}.{part}_proj.weight", *path, "gate_up_proj", "weight", index=(place,))
        self.add(f"{prefix}.down_proj.weight", *path, "down_proj", "weight")

    def experts(self, pattern: str, gate: str, up: str, down: str) -> None:
        """Tensors `pattern.format(expert=e, part=gate | up | down)` into the layer's experts."""
        assert isinstance(self.spec.ffn, MoeSpec)
        for part, matrix in ((gate, "gate_proj"), (up, "up_proj"), (down, "down_proj")):
            for expert in range(self.spec.ffn.num_experts):
                name = pattern.format(expert=expert, part=part)
                if self.table.execution.stack_experts:
                    self.add(name, "ffn", matrix, "weight", index=(expert,))
                else:
                    self.add(name, "ffn", matrix, "experts", expert)

    @property
    def is_dense(self) -> bool:
        return isinstance(self.spec.ffn, DenseSpec)


def trunk_weights(table: WeightTable, config: ModelConfig) -> None:
    """Embedding, final norm and head, under the names all families share."""
    table.add("model.embed_tokens.weight", ("embed_tokens",))
    table.add("model.norm.weight", ("norm", "weight"))
    if not config.tie_word_embeddings:
        table.add("lm_head.weight", ("lm_head", "weight"))


def rows(select: np.ndarray | slice) -> Convert:
    """Keeps the named rows (output features) of a published matrix."""
    return lambda tensor: tensor[select]

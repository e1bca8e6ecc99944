"""Says where each published tensor goes, in terms of layers and experts rather than of module trees."""

import re
from collections.abc import Callable

import numpy as np

from jaxhybrid.checkpoint.fill import WeightRule
from jaxhybrid.config import AttentionSpec, DenseSpec, LayerSpec, ModelConfig, MoeSpec
from jaxhybrid.layers.context import Execution
from jaxhybrid.layers.segments import plan_segments

Convert = Callable[[np.ndarray], np.ndarray]


class WeightTable:
    """Collects rules; `layers[l]` and `mtp[i]` are the places of a decoder's layers under one Execution."""

    def __init__(self, config: ModelConfig, execution: Execution) -> None:
        self.rules: list[WeightRule] = []
        self.ignored: list[str] = []
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

    def ignore(self, name: str) -> None:
        """The tensor may lie in the checkpoint, and nothing is made of it."""
        self.ignored.append(re.escape(name))

    def ignore_all(self, prefix: str) -> None:
        """Likewise every tensor whose name begins so."""
        self.ignored.append(re.escape(prefix) + ".*")


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

    def norms(self, prefix: str, mixer: str = "input_layernorm", ffn: str = "post_attention_layernorm") -> None:
        """The norms before mixer and feed-forward."""
        for name, place in ((mixer, "mixer_norm"), (ffn, "ffn_norm")):
            self.add(f"{prefix}.{name}.weight", place, "weight")

    def attention(self, prefix: str) -> None:
        """`{prefix}.{q,k,v,o}_proj` and what else the layer's attention has, under the names most families share."""
        spec = self.spec.mixer
        assert isinstance(spec, AttentionSpec)
        biased = {"q_proj": spec.qkv_bias, "k_proj": spec.qkv_bias, "v_proj": spec.qkv_bias, "o_proj": spec.o_bias}
        for part, bias in biased.items():
            for kind in ("weight", "bias") if bias else ("weight",):
                self.add(f"{prefix}.{part}.{kind}", "mixer", part, kind)
        for norm in ("q_norm", "k_norm") if spec.qk_norm else ():
            self.add(f"{prefix}.{norm}.weight", "mixer", norm, "weight")
        if spec.sinks:
            self.add(f"{prefix}.sinks", "mixer", "sinks")

    def dense(self, prefix: str, *path: str) -> None:
        """`{prefix}.{gate,up,down}_proj.weight` into a Dense at `path`."""
        for place, part in enumerate(("gate", "up")):
            self.add(f"{prefix}.{part}_proj.weight", *path, "gate_up_proj", "weight", index=(place,))
        self.add(f"{prefix}.down_proj.weight", *path, "down_proj", "weight")

    def experts(self, pattern: str, gate: str | None, up: str, down: str) -> None:
        """Tensors `pattern.format(expert=e, part=gate | up | down)` into the layer's experts."""
        assert isinstance(self.spec.ffn, MoeSpec)
        for part, matrix in ((gate, "gate_proj"), (up, "up_proj"), (down, "down_proj")):
            for expert in range(self.spec.ffn.num_experts if part else 0):
                self.expert(pattern.format(expert=expert, part=part), matrix, expert)

    def expert(
        self,
        name: str,
        matrix: str,
        expert: int,
        shape: tuple[int, ...] | None = None,
        convert: Convert | None = None,
    ) -> None:
        """One expert's `gate_proj`, `up_proj` or `down_proj`, alone or out of a tensor of several (`convert`)."""
        if self.table.execution.stack_experts:
            self.add(name, "ffn", matrix, "weight", index=(expert,), shape=shape, convert=convert)
        else:
            self.add(name, "ffn", matrix, "experts", expert, shape=shape, convert=convert)

    @property
    def is_dense(self) -> bool:
        return isinstance(self.spec.ffn, DenseSpec)


def trunk_weights(
    table: WeightTable,
    config: ModelConfig,
    embedding: str = "model.embed_tokens",
    norm: str = "model.norm",
    head: str = "lm_head",
) -> None:
    """Embedding, final norm and head, under the names most families share."""
    table.add(f"{embedding}.weight", ("embed_tokens",))
    table.add(f"{norm}.weight", ("norm", "weight"))
    if not config.tie_word_embeddings:
        table.add(f"{head}.weight", ("lm_head", "weight"))


def rows(select: np.ndarray | slice) -> Convert:
    """Keeps the named rows (output features) of a published matrix."""
    return lambda tensor: tensor[select]

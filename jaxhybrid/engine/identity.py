"""The identity a bundle is filed under: everything that changes the state transition."""

from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from typing import Any

import jax

from jaxhybrid.config import RopeSpec
from jaxhybrid.errors import TokenError
from jaxhybrid.model import Model
from jaxhybrid.state.schema import LeafSchema, StateSchema


def schema_of(model: Model, page_size: int, tenant: str) -> StateSchema:
    """The schema of every bundle that `model` makes for `tenant`.

    `media` is empty: under one schema, sequences with different images differ in their keys (media_memory.py).
    """
    leaves = tuple(
        LeafSchema(f"{leaf.group}.{leaf.name}", leaf.dtype, (leaf.layers, *leaf.shape)) for leaf in model.layout.leaves
    )
    devices = "one device" if model.partition is None else f"mesh {dict(model.partition.mesh.shape)}"
    ropes = {rope for layer in model.config.layers for rope in _ropes(layer.mixer)}
    rule = "; ".join(sorted(str(asdict(rope)) for rope in ropes)) or "none"
    return StateSchema(
        weights=model.fingerprint,
        config=model.config_fingerprint,
        tokenizer=_tokenizer_fingerprint(model),
        layer_schedule=tuple(layer.mixer.kind if layer.mixer else "none" for layer in model.config.layers),
        leaves=leaves,
        attention_layout="pages of tokens, each [tokens, *leaf]",
        page_size=page_size,
        positional_rule=rule,
        numerics=f"{jax.default_backend()}, {devices}, weights {model.dtypes.cache}, state {model.dtypes.state}",
        tenant=tenant,
    )


def _ropes(spec: Any) -> Iterator[RopeSpec]:
    """Of a mixer, and of the indexer or attention that is part of it."""
    if isinstance(spec, RopeSpec):
        yield spec
    elif is_dataclass(spec):
        for field in fields(spec):
            yield from _ropes(getattr(spec, field.name))


def _tokenizer_fingerprint(model: Model) -> str:
    try:
        return model.tokenizer.fingerprint
    except TokenError:
        return "none: the checkpoint has no tokenizer"

"""What a state bundle is bound to: a bundle is restored only where every part of its schema is the same."""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from jaxhybrid.errors import SchemaError

FORMAT_VERSION = 1

_SHOWN_DIFFERENCES = 20


@dataclass(frozen=True)
class LeafSchema:
    """One state leaf: its name in the layout, dtype, and shape without the pool's slots or pages."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class MediaItem:
    """One image, sound or video of a multimodal prompt: SHA-256 of its content, and its (time, height, width) grid."""

    content_hash: str
    grid: tuple[int, ...]


@dataclass(frozen=True)
class StateSchema:
    """Everything that changes the state transition, and so the identity that a bundle is filed under.

    weights, config: fingerprints of the tensors and of `config.json`.
    tokenizer: fingerprint of the tokenizer and the chat template together.
    adapter, quantisation: what was applied to the weights; None for nothing.
    layer_schedule: each layer's mixer, in order.
    leaves: every state leaf, each name once; kept in the order of names.
    attention_layout, page_size: how token-indexed memory is laid out; page_size in tokens.
    positional_rule: the rule and its parameters. media: the items of a multimodal prompt, in order.
    numerics: the class of kernels and compute dtypes within which results are bit-equal.
    tenant: who may use the bundle.

    Raises `SchemaError` when a leaf's name occurs twice.
    """

    weights: str
    config: str
    tokenizer: str
    layer_schedule: tuple[str, ...]
    leaves: tuple[LeafSchema, ...]
    attention_layout: str
    page_size: int
    positional_rule: str
    numerics: str
    tenant: str
    adapter: str | None = None
    quantisation: str | None = None
    media: tuple[MediaItem, ...] = ()
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        twice = sorted(name for name, count in Counter(leaf.name for leaf in self.leaves).items() if count > 1)
        if twice:
            raise SchemaError(f"leaves: expected each name once, found more of {', '.join(twice)}")
        # A leaf goes by its name: the same leaves in another order are the same schema.
        object.__setattr__(self, "leaves", tuple(sorted(self.leaves, key=lambda leaf: leaf.name)))

    def fingerprint(self) -> str:
        """SHA-256 of the schema, as 64 hexadecimal digits: equal exactly when every field is."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """The schema as JSON values."""
        return msgspec.to_builtins(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The schema of `to_dict`. Raises `SchemaError` when the format is another or a field is wrong."""
        if data.get("format_version") != FORMAT_VERSION:
            raise SchemaError(f"format_version: expected {FORMAT_VERSION}, found {data.get('format_version')!r}")
        unknown = data.keys() - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise SchemaError(f"expected the fields of a state schema, found also {', '.join(sorted(unknown))}")
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise SchemaError(f"expected a state schema: {error}") from error


def check_restorable(stored: StateSchema, current: StateSchema) -> None:
    """Raises `SchemaError` naming each field in which `stored` differs from `current`, with both values."""
    differences = list(_differences("", _comparable(stored), _comparable(current)))
    if not differences:
        return
    lines = [f"state of another schema: {len(differences)} difference{'s' * (len(differences) > 1)}"]
    lines += differences[:_SHOWN_DIFFERENCES]
    if len(differences) > _SHOWN_DIFFERENCES:
        lines.append(f"and {len(differences) - _SHOWN_DIFFERENCES} more")
    raise SchemaError("\n  ".join(lines))


def _comparable(schema: StateSchema) -> dict[str, Any]:
    """Nested dicts: a layer or media item under its position, a leaf's dtype and shape under its name."""
    data = schema.to_dict()
    data["leaves"] = {leaf.pop("name"): leaf for leaf in data["leaves"]}
    return data | {field: dict(enumerate(data[field])) for field in ("layer_schedule", "media")}


def _differences(where: str, stored: Mapping[Any, Any], current: Mapping[Any, Any]) -> Iterator[str]:
    for key in [*stored, *(key for key in current if key not in stored)]:
        here = f"{where}[{key!r}]" if where else str(key)
        before, now = stored.get(key, _ABSENT), current.get(key, _ABSENT)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            yield from _differences(here, before, now)
        elif before != now:
            yield f"{here}: stored {before!r}, current {now!r}"


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


_ABSENT = _Absent()

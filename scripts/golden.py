"""What one golden is made of: a tiny configuration, and how a family differs from the rule of make_goldens.py."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]
Tensors = dict[str, Any]  # published name -> torch tensor
Forward = Callable[[Any], tuple[Any, Any]]  # input_ids [B,T] -> logits [B,T,V], mtp logits [B,T-1,V] or None


@dataclass(frozen=True)
class OwnReference:
    """A torch reference of this project's own, for what `transformers` lacks.

    forward: (config, tensors) to a Forward. shapes: every tensor's published name and shape.
    """

    forward: Callable[[Config, Tensors], Forward]
    shapes: Callable[[Config], Mapping[str, tuple[int, ...]]]


def _nothing(*arguments: Any) -> None:
    return None


@dataclass(frozen=True)
class Golden:
    """A tiny model and where its family leaves the rule.

    config: `config.json` in the key style of the released checkpoint.
    shards: files that the tensors are shared out to.
    zero_centred: whether the norm of that name multiplies by 1 + weight.
    random: (name, shape, generator) to a tensor of the family's own choice, or None for make_goldens.random_tensor.
    as_published: tensors as `save_pretrained` writes them, to those of the released checkpoint.
    stored: published tensors to what is written to disk (quantised); the reference sees what `loaded` makes of it.
    loaded: the inverse of `stored`, exactly: the values that the file stands for.
    mtp: (config, tensors, input_ids, trunk [B,T,D] after the final norm) to mtp logits [B,T-1,V].
    further: (transformers model or own reference, config, seed) to arrays beside those of text, or None if another seed
        is needed.
    reference: in place of transformers. second_reference: must equal transformers wherever both apply.
    """

    config: Config
    shards: int = 1
    zero_centred: Callable[[str], bool] = lambda name: False
    random: Callable[[str, tuple[int, ...], Any], Any] = _nothing
    as_published: Callable[[Tensors], Tensors] = dict
    stored: Callable[[Tensors], Tensors] = dict
    loaded: Callable[[Tensors], Tensors] = dict
    mtp: Callable[[Config, Tensors, Any, Any], Any] | None = None
    further: Callable[[Any, Config, int], Tensors | None] | None = None
    reference: OwnReference | None = None
    second_reference: OwnReference | None = None

"""All that is wrong with a checkpoint, in one error."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxhybrid.errors import CheckpointError

_LISTED = 20


def raise_problems(problems: Sequence[str], folder: Path) -> None:
    """Raises a `CheckpointError` listing the first twenty problems and the count of all, if there are any."""
    if not problems:
        return
    lines = [f"{folder}: {len(problems)} problem{'s' * (len(problems) > 1)} with its tensors", *problems[:_LISTED]]
    if len(problems) > _LISTED:
        lines.append(f"and {len(problems) - _LISTED} more")
    raise CheckpointError("\n  ".join(lines))


def show_path(path: tuple[Any, ...]) -> str:
    """A leaf's path as messages write it."""
    return ".".join(map(str, path))


def dtype_kind(dtype: np.dtype) -> str:
    """What a tensor's cast has to keep: floating, integer or bool."""
    for kind in (jnp.floating, jnp.integer, jnp.bool_):
        if jnp.issubdtype(dtype, kind):
            return kind.__name__
    return str(dtype)

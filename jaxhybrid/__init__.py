"""jaxhybrid: an inference runtime in JAX for hybrid language models."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxhybrid.cache.retention import Retention as Retention
    from jaxhybrid.engine.config import EngineConfig as EngineConfig
    from jaxhybrid.engine.engine import Engine as Engine
    from jaxhybrid.engine.sampling import Sampling as Sampling
    from jaxhybrid.engine.sequence import Generation as Generation
    from jaxhybrid.engine.sequence import Mark as Mark
    from jaxhybrid.engine.sequence import Reuse as Reuse
    from jaxhybrid.engine.sequence import Sequence as Sequence
    from jaxhybrid.media import Media as Media
    from jaxhybrid.model import Model as Model
    from jaxhybrid.model import forward as forward
    from jaxhybrid.model import load_model as load_model
    from jaxhybrid.parallel.mesh import make_mesh as make_mesh

# Loaded on first use: reading traces and printing help must not wait for jax.
_HOME = {
    "Engine": "engine.engine",
    "EngineConfig": "engine.config",
    "Generation": "engine.sequence",
    "Mark": "engine.sequence",
    "Media": "media",
    "Model": "model",
    "Retention": "cache.retention",
    "Reuse": "engine.sequence",
    "Sampling": "engine.sampling",
    "Sequence": "engine.sequence",
    "forward": "model",
    "load_model": "model",
    "make_mesh": "parallel.mesh",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)

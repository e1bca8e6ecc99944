"""What this package asks of jax: for the process, and for a platform's programs."""

import os
from pathlib import Path

import jax


def use_compilation_cache(folder: str | None = None) -> None:
    """Keeps compiled programs on disk, so that a second process starts warm.

    `folder` defaults to jax's own setting, if there is one, and else to `jaxhybrid` in the user's cache folder.
    """
    if folder is None and jax.config.values["jax_compilation_cache_dir"]:
        return
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    jax.config.update("jax_compilation_cache_dir", folder or str(Path(home) / "jaxhybrid"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def compiler_options(platform: str) -> dict[str, str | bool]:
    """Of a model's programs on `cpu`, `tpu` or `gpu`.

    XLA for GPUs makes one product of several that share a factor, and for that puts their weights together: it would
    copy the projections of every layer at each call.
    """
    return {"xla_gpu_dot_merger_threshold_mb": "0"} if platform == "gpu" else {}

"""What this process asks of jax before it compiles anything."""

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

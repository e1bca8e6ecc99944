"""The tiny models behind tests/goldens: one file per family, each with a dict GOLDENS from folder name to Golden."""

import importlib
import pkgutil

from golden import Golden

GOLDENS: dict[str, Golden] = {
    name: golden
    for module in sorted(info.name for info in pkgutil.iter_modules(__path__))
    for name, golden in importlib.import_module(f"golden_configs.{module}").GOLDENS.items()
}

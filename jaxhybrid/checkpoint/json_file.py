"""JSON objects in files: read with errors that name the file, written whole or not at all."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxhybrid.errors import CheckpointError


def read_json_object(path: Path, **options: Any) -> dict[str, Any]:
    """The JSON object in a file; `options` go to `json.loads`. Raises `CheckpointError` naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), **options)
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: expected a file {path.name}, found none") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `object_pairs_hook`: the object, or a `ValueError` naming a key that occurs twice."""
    value = dict(pairs)
    if len(value) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate entry {next(name for name in names if names.count(name) > 1)!r}")
    return value


def write_json_object(path: Path, value: Mapping[str, Any]) -> None:
    """Written aside and moved into place, so that no reader ever finds half a file. Raises `OSError`."""
    text = json.dumps(value, indent=1)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise

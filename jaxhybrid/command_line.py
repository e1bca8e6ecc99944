"""How the project's scripts start, and how they end on what a user got wrong."""

import sys
from collections.abc import Callable
from typing import NoReturn

from absl import app, flags, logging

from jaxhybrid.errors import JaxHybridError


def run(main: Callable[[list[str]], None]) -> None:
    """`absl.app.run`, with warnings and errors of libraries alone, unless --verbosity asks for more.

    absl shows their notes too where the flag is not given, such as jax's that a machine has no TPU.

    Flags that cannot be parsed, and a UsageError, JaxHybridError or OSError that `main` raises, are one line on stderr
    and exit status 1.
    """

    def start(arguments: list[str]) -> None:
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)
        try:
            main(arguments)
        except (app.UsageError, JaxHybridError, OSError) as error:
            _fail(error)

    app.run(start, flags_parser=_parse)


def _parse(arguments: list[str]) -> list[str]:
    try:
        return flags.FLAGS(arguments)
    except flags.Error as error:
        _fail(error)


def _fail(error: Exception) -> NoReturn:
    print("error:", " ".join(str(error).split()), file=sys.stderr)
    raise SystemExit(1) from error

"""How the project's scripts start."""

from collections.abc import Callable

from absl import app, flags, logging


def run(main: Callable[[list[str]], None]) -> None:
    """`absl.app.run`, with warnings and errors of libraries alone, unless --verbosity asks for more.

    absl shows their notes too where the flag is not given, such as jax's that a machine has no TPU.
    """

    def start(arguments: list[str]) -> None:
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)
        main(arguments)

    app.run(start)

"""What libraries log shows when it is a warning; notes only on request."""

import subprocess
import sys

import pytest

SCRIPT = """
import logging
from jaxhybrid.command_line import run

def main(arguments):
    logging.getLogger("jax._src.xla_bridge").info("no TPU here")
    logging.getLogger("jax._src.xla_bridge").warning("slow path")
    print("arguments", arguments[1:])

if __name__ == "__main__":
    run(main)
"""


@pytest.mark.parametrize(("flags", "notes"), [([], False), (["--verbosity=0"], True)])
def test_notes_of_libraries_show_on_request_and_warnings_always(tmp_path, flags, notes):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run([sys.executable, script, *flags, "rest"], capture_output=True, text=True, check=True)
    assert done.stdout == "arguments ['rest']\n"
    assert "slow path" in done.stderr
    assert ("no TPU here" in done.stderr) == notes

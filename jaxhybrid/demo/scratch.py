"""Scratch packages: copies of standard-library modules, tests that pin their behaviour, and one planted bug."""

import ast
import importlib
import io
import random
import sysconfig
import tokenize
import warnings
from dataclasses import dataclass
from pathlib import Path

from jaxhybrid.demo.specimens import EXPRESSIONS
from jaxhybrid.demo.workspace import Workspace

SWAPS = {
    "<": "<=",
    "<=": "<",
    ">": ">=",
    ">=": ">",
    "==": "!=",
    "!=": "==",
    "+": "-",
    "-": "+",
    "*": "+",
    "//": "*",
    "%": "//",
    "and": "or",
    "or": "and",
    "True": "False",
    "False": "True",
    "min": "max",
    "max": "min",
    "0": "1",
    "1": "2",
    "2": "1",
    "-1": "0",
}


@dataclass(frozen=True)
class Bug:
    """One line of one function, before and after. `number` counts lines from 1."""

    module: str
    path: str
    function: str
    number: int
    good: str
    bad: str


def available_modules() -> list[str]:
    """Names of the specimens this Python still carries, sorted."""
    return sorted(name for name in EXPRESSIONS if _source(name).is_file())


def build_package(workspace: Workspace, package: str, modules: list[str]) -> None:
    """Write `package` with copies of `modules`, a test file for each, and a short readme."""
    workspace.write(f"{package}/__init__.py", f'"""{package}: {", ".join(modules)}."""\n')
    workspace.write("tests/__init__.py", "")
    for module in modules:
        workspace.write(f"{package}/{module}.py", _source(module).read_text(encoding="utf-8"))
        workspace.write(f"tests/test_{module}.py", _test_file(package, module))
    rows = [f"- `{package}/{module}.py`: {_first_line(module)}" for module in modules]
    workspace.write("README.md", "\n".join([f"# {package}", "", *rows, "", "Tests: `python -m unittest`.", ""]))


def plant_bug(workspace: Workspace, package: str, module: str, rng: random.Random) -> Bug:
    """Swap one operator, constant or keyword of `module` so that at least one of its tests fails.

    Raises ValueError if no swap does.
    """
    path = f"{package}/{module}.py"
    original = workspace.read(path)
    candidates = _mutations(original)
    rng.shuffle(candidates)
    for number, start, end, new, function in candidates:
        lines = original.splitlines(keepends=True)
        good = lines[number - 1]
        bad = good[:start] + new + good[end:]
        lines[number - 1] = bad
        workspace.write(path, "".join(lines))
        report = workspace.run_tests(f"tests.test_{module}")
        if "FAILED" in report and "error: " not in report and "ImportError" not in report:
            return Bug(module, path, function, number, good.rstrip("\n"), bad.rstrip("\n"))
    workspace.write(path, original)
    raise ValueError(f"no swap in {module} makes one of its tests fail")


def _source(module: str) -> Path:
    return Path(sysconfig.get_path("stdlib")) / f"{module}.py"


def _first_line(module: str) -> str:
    text = ast.get_docstring(ast.parse(_source(module).read_text(encoding="utf-8"))) or module
    return text.splitlines()[0].rstrip(".")


def _test_file(package: str, module: str) -> str:
    """Tests whose expected values come from running the expressions on the installed module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        installed = importlib.import_module(module)
    lines = [
        "import unittest",
        "",
        f"from {package} import {module}",
        "",
        "",
        f"class {module.title()}Test(unittest.TestCase):",
    ]
    for number, expression in enumerate(EXPRESSIONS[module], 1):
        value = eval(expression, {module: installed})
        lines += [f"    def test_{_verb(expression, module)}_{number}(self):", f"        got = {expression}"]
        lines += [f"        self.assertEqual({_comparison(value)})", ""]
    return "\n".join(lines)


def _comparison(value: object) -> str:
    try:
        ast.literal_eval(repr(value))
    except ValueError:
        return f"repr(got), {repr(value)!r}"
    return f"got, {value!r}"


def _verb(expression: str, module: str) -> str:
    name = expression.split(f"{module}.", 1)[1]
    return "".join(c if c.isalnum() else " " for c in name).split()[0].lower()


def _mutations(source: str) -> list[tuple[int, int, int, str, str]]:
    """(line, start column, end column, replacement, function) of each token inside a function that can be swapped."""
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef)]
    found = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        new = SWAPS.get(token.string) if token.type in (tokenize.OP, tokenize.NAME, tokenize.NUMBER) else None
        line = token.start[0]
        inside = [f for f in functions if f.body[0].lineno <= line <= (f.end_lineno or 0)]
        if new is not None and inside:
            name = max(inside, key=lambda f: f.lineno).name
            found.append((line, token.start[1], token.end[1], new, name))
    return found

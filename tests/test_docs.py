"""The documents say what is so: their code runs, their links lead somewhere, and no module or script is left out."""

import ast
import contextlib
import io
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from jaxhybrid.chat import ChatTokenizer
from jaxhybrid.traces.pipeline import read_traces, tokenise_traces
from jaxhybrid.traces.report_content import policy_table
from jaxhybrid.traces.simulate import simulate

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
MODULES = sorted(
    path.relative_to(ROOT)
    for package in ("jaxhybrid", "pallas_kernels")
    for path in (ROOT / package).rglob("*.py")
    if path.read_text(encoding="utf-8").strip()
)
SCRIPTS = sorted(path.name for path in ROOT.glob("scripts/*.py"))


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """Fenced blocks, as (language, content)."""
    return ((match[1], match[2]) for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


# What the documents show


@pytest.mark.parametrize("name", ["README.md", pytest.param("docs/engine.md", marks=pytest.mark.slow)])
def test_python_examples_print_what_the_page_shows(name: str) -> None:
    """Blocks of a page share their names, as if typed one after another."""
    found = list(blocks(read(name)))
    namespace: dict[str, object] = {}
    shown = 0
    for place, (language, code) in enumerate(found):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, f"{name}, block {place}", "exec"), namespace)
        if place + 1 < len(found) and found[place + 1][0] == "text":
            assert printed.getvalue() == found[place + 1][1]
            shown += 1
    assert shown


def test_the_readme_shows_the_policy_study_of_the_projects_own_recordings() -> None:
    demo = Path(str(files("jaxhybrid") / "demo"))
    tokenised = tokenise_traces(read_traces([demo / "traces"]), ChatTokenizer.from_folder(demo))
    table = policy_table(simulate(tokenised))
    columns = [table.header.index(name) for name in ("policy", "gap", "amplification", "hit rate")]
    true_rows = {f"| {' | '.join(row[column] for column in columns)} |" for row in table.rows}
    _, _, shown = read("README.md").partition(
        "| policy | gap | amplification | hit rate |\n| --- | --- | --- | --- |\n"
    )
    rows = shown.split("\n\n")[0].splitlines()
    assert len(rows) >= 5
    assert [row for row in rows if row not in true_rows] == []


def test_commands_name_files_and_flags_that_exist() -> None:
    for name in NAMES:
        for language, block in blocks(read(name)):
            if language != "sh":
                continue
            for line in block.splitlines():
                for script in re.findall(r"scripts/(\w+\.py)", line):
                    source = read(f"scripts/{script}")
                    flags = re.findall(r"--(?:no(?=splice|shared))?(\w+)", line.split("#")[0])
                    assert [flag for flag in flags if f'"{flag}"' not in source] == [], f"{name}: {line}"


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(read(name))):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (ROOT / name).parent / path if path else ROOT / name
        if not linked.exists() or (anchor and linked.suffix == ".md" and anchor not in anchors(linked)):
            broken.append(target)
    assert broken == []


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", without_code(path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_files_named_in_a_document_exist(name: str) -> None:
    """Whole paths in backticks; `<family>` and such are placeholders."""
    named = re.findall(r"`((?:jaxhybrid|pallas_kernels|scripts|tests|configs|docs)/[\w./-]*)`", read(name))
    assert [path for path in named if not (ROOT / path).exists()] == []


# What the documents must not leave out


def sections(text: str) -> dict[str, set[str]]:
    """Of ARCHITECTURE.md: the modules listed under each heading that names a folder."""
    parts = re.split(r"^### `([\w/]+)/`$", text, flags=re.MULTILINE)
    return {
        folder: set(re.findall(r"^\| `([\w/]+\.py)` \|", part, re.MULTILINE))
        for folder, part in zip(parts[1::2], parts[2::2], strict=True)
    }


def test_architecture_lists_every_module_once_and_no_other() -> None:
    listed = sorted(
        Path(folder) / module for folder, modules in sections(read("ARCHITECTURE.md")).items() for module in modules
    )
    assert listed == MODULES


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_is_in_a_document(script: str) -> None:
    assert any(f"scripts/{script}" in read(name) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_lines_fit(name: str) -> None:
    """Prose; tables and commands may be longer."""
    text = re.sub(r"^```.*?^```$", "", read(name), flags=re.MULTILINE | re.DOTALL)
    assert [line for line in text.splitlines() if len(line) > 130 and not line.startswith("|")] == []


# Which way imports point


def imports(path: Path) -> set[str]:
    """Modules that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("pallas_kernels", ["jaxhybrid"]),
        ("jaxhybrid/cache", ["jax", "flax", "jaxhybrid.state", "jaxhybrid.engine", "jaxhybrid.models"]),
        ("jaxhybrid/state", ["jaxhybrid.engine", "jaxhybrid.models", "jaxhybrid.layers", "jaxhybrid.cache"]),
        ("jaxhybrid/layers", ["jaxhybrid.models", "jaxhybrid.engine", "jaxhybrid.checkpoint"]),
        ("jaxhybrid/models", ["jaxhybrid.engine", "jaxhybrid.traces", "jaxhybrid.model"]),
        ("jaxhybrid/engine", ["jaxhybrid.traces", "jaxhybrid.models", "jaxhybrid.demo"]),
        ("jaxhybrid/traces/readers", ["jax", "flax", "jaxhybrid.engine", "jaxhybrid.model"]),
    ],
)
def test_imports_point_one_way(package: str, forbidden: list[str]) -> None:
    paths = list((ROOT / package).rglob("*.py"))
    assert paths
    wrong = {
        f"{path.relative_to(ROOT)}: {module}"
        for path in paths
        for module in imports(path)
        if any(module == name or module.startswith(f"{name}.") for name in forbidden)
    }
    assert wrong == set()

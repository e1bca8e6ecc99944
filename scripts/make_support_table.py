"""Writes the table of supported models into README.md and docs/models.md, from the results of the golden tests.

make golden ARGS=--junitxml=golden.xml
pytest tests/test_media.py --junitxml=media.xml
python scripts/make_support_table.py --results=golden.xml,media.xml

Several result files may be given; of a test that is in more than one the last counts.
"""

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from absl import app, flags

from jaxhybrid.command_line import run

RESULTS = flags.DEFINE_list("results", None, "JUnit XML files of pytest runs.", required=True)

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "models.md")
BEGIN, END = "<!-- support table: scripts/make_support_table.py -->", "<!-- end of support table -->"
IMAGES = r"test_\w*(?:image|video|vision|multimodal)\w*"


@dataclass(frozen=True)
class Column:
    """tests: regular expression of the tests that must pass. needs: array or config key that a golden must have."""

    title: str
    tests: str
    needs: str | None = None


COLUMNS = (
    Column("logits", r"test_forward_equals_the_reference"),
    Column("decode", r"test_token_by_token_decode_equals_the_reference|test_mixed_batch_in_odd_chunks\w*"),
    Column("reuse", r"test_greedy_tokens_by_every_route"),
    Column("fork", r"test_greedy_tokens_by_every_route"),
    Column("MTP", r"test_multi_token_prediction_equals_the_reference", needs="mtp_logits"),
    Column("multimodal", IMAGES, needs="vl_logits"),
    Column("quantised weights", r"test_forward_equals_the_reference", needs="quantization_config"),
)


@dataclass(frozen=True)
class Golden:
    """A tiny checkpoint with recorded logits: its `model_type`, and the names of its arrays and config keys."""

    model_type: str
    has: frozenset[str]


def main(_: list[str]) -> None:
    from jaxhybrid.models import FAMILIES

    results: dict[tuple[str, str], bool] = {}
    for path in RESULTS.value:
        results |= read_results(Path(path))
    table = support_table(list(dict.fromkeys(FAMILIES.values())), goldens(), results)
    for page in PAGES:
        page.write_text(with_table(page.read_text(encoding="utf-8"), table), encoding="utf-8")
    print("\n".join(table))


def read_results(path: Path) -> dict[tuple[str, str], bool]:
    """(test, its first parameter) -> whether it passed; tests that were skipped are left out. Raises UsageError."""
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except ElementTree.ParseError as error:
        raise app.UsageError(f"{path}: expected JUnit XML: {error}") from error
    found = {}
    for case in cases:
        test, _, parameters = case.get("name", "").partition("[")
        outcomes = {child.tag for child in case}
        if "skipped" not in outcomes:
            found[test, parameters.rstrip("]")] = not outcomes & {"failure", "error"}
    return found


def goldens() -> dict[str, Golden]:
    """Every golden of the tests, by the name of its folder."""
    import numpy as np

    found = {}
    for file in sorted(ROOT.glob("tests/goldens/*/golden.npz")):
        config = json.loads((file.parent / "config.json").read_text(encoding="utf-8"))
        with np.load(file) as arrays:
            has = frozenset([*arrays.files, *config, *config.get("text_config", {})])
        found[file.parent.name] = Golden(config["model_type"], has)
    return found


def support_table(
    families: Sequence[ModuleType], known: Mapping[str, Golden], results: Mapping[tuple[str, str], bool]
) -> list[str]:
    """Rows of Markdown: a family, and a cell for each column."""
    lines = [
        "| family | `model_type` | " + " | ".join(column.title for column in COLUMNS) + " |",
        "| --- " * (2 + len(COLUMNS)) + "|",
    ]
    for family in families:
        own = {name: golden for name, golden in known.items() if golden.model_type in family.MODEL_TYPES}
        cells = [cell(column, own, results) for column in COLUMNS]
        types = ", ".join(f"`{name}`" for name in family.MODEL_TYPES)
        lines.append(f"| {title(family)} | {types} | " + " | ".join(cells) + " |")
    return lines


def title(family: ModuleType) -> str:
    """What a family's docstring begins with, up to its `model_type` or its description."""
    return re.split(r" ?\(`|:", family.__doc__ or "")[0]


def cell(column: Column, own: Mapping[str, Golden], results: Mapping[tuple[str, str], bool]) -> str:
    """`yes` if all tests of the column passed for every golden that has what it needs; `-` if none has."""
    wanted = [name for name, golden in own.items() if column.needs is None or column.needs in golden.has]
    if not wanted:
        return "-"
    outcomes = [outcomes_of(column, name, results) for name in wanted]
    if not all(outcomes):
        return "not run"
    failed = [name for name, passed in zip(wanted, outcomes, strict=True) if not all(passed)]
    return f"**no** ({', '.join(failed)})" if failed else "yes"


def outcomes_of(column: Column, golden: str, results: Mapping[tuple[str, str], bool]) -> list[bool]:
    return [
        passed
        for (test, parameter), passed in results.items()
        if re.fullmatch(column.tests, test) and golden in re.split(r"-", parameter)
    ]


def with_table(page: str, table: Iterable[str]) -> str:
    """The page with the lines between its two markers replaced. Raises ValueError if it hasn't got them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"expected the markers {BEGIN} and {END}")
    return "\n".join([before + BEGIN, *table, END + after])


if __name__ == "__main__":
    run(main)

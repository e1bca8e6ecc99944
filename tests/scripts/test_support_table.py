"""The table of supported models: what makes a cell, and that the pages have a row for every family."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from jaxhybrid.models import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from make_support_table import BEGIN, COLUMNS, END, PAGES, Golden, read_results, support_table, with_table  # noqa: E402

XML = """<testsuites><testsuite>
<testcase classname="tests.test_goldens" name="test_forward_equals_the_reference[a1]"/>
<testcase classname="tests.test_goldens" name="test_forward_equals_the_reference[a2]"><failure>no</failure></testcase>
<testcase classname="tests.test_goldens" name="test_forward_equals_the_reference[b1]"/>
<testcase classname="tests.test_goldens" name="test_token_by_token_decode_equals_the_reference[b1]"/>
<testcase classname="tests.test_goldens" name="test_mixed_batch_in_odd_chunks_equals_the_reference[b1]"/>
<testcase classname="tests.test_goldens" name="test_greedy_tokens_by_every_route[b1]"><skipped/></testcase>
<testcase classname="tests.test_vision" name="test_images_equal_the_reference[b1]"/>
<testcase classname="tests.test_goldens" name="test_multi_token_prediction_equals_the_reference[b1]"/>
</testsuite></testsuites>"""


def family(doc: str, *types: str) -> ModuleType:
    made = ModuleType(types[0], doc)
    made.__dict__["MODEL_TYPES"] = types
    return made


def test_cells(tmp_path: Path) -> None:
    (tmp_path / "golden.xml").write_text(XML)
    results = read_results(tmp_path / "golden.xml")
    families = [family("Alpha 1 (`alpha`): dense.", "alpha"), family("Beta, all of it: sparse.", "beta", "beta_text")]
    known = {
        "a1": Golden("alpha", frozenset({"logits"})),
        "a2": Golden("alpha", frozenset({"logits", "quantization_config"})),
        "b1": Golden("beta_text", frozenset({"logits", "mtp_logits", "vl_logits"})),
    }
    assert support_table(families, known, results)[2:] == [
        "| Alpha 1 | `alpha` | **no** (a2) | not run | not run | not run | - | - | **no** (a2) |",
        "| Beta, all of it | `beta`, `beta_text` | yes | yes | not run | not run | yes | yes | - |",
    ]


def test_only_what_is_between_the_markers_changes() -> None:
    assert with_table(f"above\n{BEGIN}\nold\n{END}\nbelow\n", ["| new |"]) == f"above\n{BEGIN}\n| new |\n{END}\nbelow\n"
    with pytest.raises(ValueError, match="expected the markers"):
        with_table("a page without them", [])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_list_every_family(page: Path) -> None:
    _, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    header, _, *rows = rest.partition(END)[0].strip().splitlines()
    assert header.split(" | ")[2:] == [column.title for column in COLUMNS[:-1]] + [f"{COLUMNS[-1].title} |"]
    listed = {name.strip(" `") for row in rows for name in row.split("|")[2].split(",")}
    assert listed == set(FAMILIES)
    assert [row for row in rows if "**no**" in row] == []

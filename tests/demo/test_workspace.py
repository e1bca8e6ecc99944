"""The tools a scripted agent works with."""

from pathlib import Path

import pytest

from jaxhybrid.demo.workspace import TOOLS, Workspace

TEST_FILE = """
import unittest
from pkg import thing


class ThingTest(unittest.TestCase):
    def test_value(self):
        self.assertEqual(thing.value, 3)
"""


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    space = Workspace(tmp_path)
    space.write("pkg/__init__.py", "")
    space.write("pkg/thing.py", "value = 2\nother = 2 + value\n")
    space.write("tests/__init__.py", "")
    space.write("tests/test_thing.py", TEST_FILE)
    return space


def test_list_and_grep_name_files_relative_to_the_root(workspace: Workspace) -> None:
    assert workspace.call("list_files", {"path": "pkg"}) == "pkg/__init__.py (0 lines)\npkg/thing.py (2 lines)"
    assert workspace.call("grep", {"pattern": r"= 2\b", "path": "."}).splitlines() == [
        "pkg/thing.py:1: value = 2",
        "pkg/thing.py:2: other = 2 + value",
    ]
    assert workspace.call("grep", {"pattern": "absent", "path": "pkg"}) == "no matches"


def test_read_file_gives_the_lines_asked_for(workspace: Workspace) -> None:
    text = workspace.call("read_file", {"path": "pkg/thing.py", "start": 2, "end": 9})
    assert text == "pkg/thing.py, lines 2 to 2 of 2\nother = 2 + value"
    assert workspace.call("read_file", {"path": "nowhere.py"}) == "error: no file nowhere.py"


def test_an_edit_that_makes_the_failing_test_pass(workspace: Workspace) -> None:
    before = workspace.call("run_tests", {})
    assert "FAIL: test_value" in before
    assert "AssertionError: 2 != 3" in before
    edit = {"path": "pkg/thing.py", "old": "value = 2", "new": "value = 3"}
    assert workspace.call("edit_file", edit) == "edited pkg/thing.py at line 1"
    assert workspace.call("run_tests", {"module": "tests.test_thing"}).endswith("Ran 1 test\n\nOK")


def test_an_ambiguous_edit_changes_nothing(workspace: Workspace) -> None:
    answer = workspace.call("edit_file", {"path": "pkg/thing.py", "old": "2", "new": "5"})
    assert answer == "error: the text occurs 2 times in pkg/thing.py, expected once"
    assert workspace.read("pkg/thing.py") == "value = 2\nother = 2 + value\n"


def test_test_reports_hold_neither_the_scratch_path_nor_timings(workspace: Workspace, tmp_path: Path) -> None:
    report = workspace.call("run_tests", {})
    assert str(tmp_path) not in report
    assert 'File "/workspace/tests/test_thing.py"' in report
    assert "Ran 1 test\n" in report


def test_every_tool_but_delegate_can_be_called(workspace: Workspace) -> None:
    names = {tool["function"]["name"] for tool in TOOLS}
    assert names - set(workspace._tools) == {"delegate"}

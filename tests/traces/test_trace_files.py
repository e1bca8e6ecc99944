import json

import pytest

from jaxhybrid.errors import TraceError
from jaxhybrid.traces.files import Record, find_files, read_records


def write(path, text):
    path.write_text(text)
    return path


def test_folders_give_trace_files_in_order_of_name(tmp_path):
    for name in ("b.json", "a.jsonl", "notes.md", "sub/c.traj"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, "{}")
    named = write(tmp_path / "log.txt", "{}")
    assert find_files([named, tmp_path, tmp_path / "b.json"]) == [
        named,
        tmp_path / "a.jsonl",
        tmp_path / "b.json",
        tmp_path / "sub/c.traj",
    ]


def test_missing_path_and_empty_folder_are_errors(tmp_path):
    with pytest.raises(TraceError, match=r"nowhere: no such file or folder"):
        find_files([tmp_path / "nowhere"])
    with pytest.raises(TraceError, match=r"no trace files \(.json, .jsonl, .traj\) under"):
        find_files([tmp_path])


def test_lines_know_their_number_and_broken_ones_are_values(tmp_path):
    file = write(tmp_path / "runs.jsonl", '{"a": 1}\n\n{"a": \n[2]\n')
    first, broken, last = read_records(file)
    assert (first.value, first.source, first.name) == ({"a": 1}, f"{file}:1", "runs")
    assert isinstance(broken, TraceError)
    assert str(broken) == f"{file}:3: expected JSON, got text that breaks off at column 6"
    assert (last.value, last.source, last.name) == ([2], f"{file}:4", "runs:4")


def test_bytes_that_are_no_text_are_an_error_value(tmp_path):
    file = tmp_path / "runs.jsonl"
    file.write_bytes(b'{"a": "\xff"}\n{"a": 2}\n')
    broken, good = read_records(file)
    assert str(broken) == f"{file}:1: expected UTF-8, got byte 0xff"
    assert good.value == {"a": 2}


def test_a_document_over_many_lines_is_one_record_and_its_error_has_the_line(tmp_path):
    good = write(tmp_path / "good.json", json.dumps({"a": [1, 2]}, indent=2))
    assert [record.value for record in read_records(good)] == [{"a": [1, 2]}]
    bad = write(tmp_path / "bad.json", '{\n  "a": 1,\n  "b" 2\n}\n')
    (error,) = read_records(bad)
    assert str(error) == f"{bad}:3: expected JSON, got '2' at column 7 (expecting ':' delimiter)"
    cut = write(tmp_path / "cut.json", '{\n  "a": "half a li')
    (error,) = read_records(cut)
    assert str(error) == f"{cut}:2: expected JSON, got a string from column 8 on that does not end"


@pytest.mark.parametrize("name", ["none.json", "none.jsonl"])
def test_an_empty_file_is_an_error_value(tmp_path, name):
    for content in ("", "\n \n"):
        file = write(tmp_path / name, content)
        (error,) = read_records(file)
        assert str(error) == f"{file}: expected JSON, got an empty file"


def test_lines_are_recognised_under_another_name(tmp_path):
    file = write(tmp_path / "runs.json", '{"a": 1}\n{"a": 2}\n')
    assert [record.value for record in read_records(file)] == [{"a": 1}, {"a": 2}]


def test_entries_of_a_list_are_named_by_index(tmp_path):
    file = tmp_path / "runs.json"
    entries = list(Record([{"a": 1}, {"a": 2}], f"{file}:1", file).entries())
    assert [(entry.source, entry.name) for entry in entries] == [
        (f"{file}[0]", "runs[0]"),
        (f"{file}[1]", "runs[1]"),
    ]

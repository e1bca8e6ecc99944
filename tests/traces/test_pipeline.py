import json

import grain
import pytest
from byte_tokenizer import ByteTokenizer

from jaxhybrid.errors import TraceError
from jaxhybrid.traces.pipeline import Shard, read_traces, tokenise_traces
from jaxhybrid.traces.trajectory import TokenTrajectory


def line(content):
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "yes"}]
    return json.dumps({"id": content, "messages": messages})


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b.jsonl").write_text("\n".join([line("x"), "{", line("y"), line("z")]))
    (tmp_path / "a.json").write_text(line("x"))
    (tmp_path / "c.json").write_text("[]")
    return tmp_path


def names(items):
    return [str(item).rpartition("/")[2][:9] if isinstance(item, TraceError) else item.id for item in items]


def test_files_in_order_with_errors_in_place_and_unique_ids(folder):
    assert names(read_traces([folder])) == ["x", "x#2", "b.jsonl:2", "y", "z", "c.json:1:"]


def test_shards_part_the_whole(folder):
    whole = names(read_traces([folder]))
    parts = [names(read_traces([folder], shard=Shard.parse(f"{i}/4"))) for i in range(4)]
    assert parts == [whole[i::4] for i in range(4)]


@pytest.mark.parametrize("text", ["4/4", "a/2", "1", "-1/2", "0/0", "1/2/3"])
def test_a_shard_is_i_of_n(text):
    with pytest.raises(TraceError, match=r"expected a shard i/n with 0 <= i < n, got "):
        Shard.parse(text)


def test_iterators_are_saved_and_restored(folder):
    traces = read_traces([folder])
    iterator = iter(traces)
    taken = [next(iterator) for _ in range(3)]
    state = json.loads(json.dumps(iterator.get_state()))
    rest = names(iterator)
    restored = iter(traces)
    restored.set_state(state)
    assert names(restored) == rest
    assert len(taken) + len(rest) == 6


def test_reading_is_lazy(folder):
    iterator = iter(read_traces([folder]))
    next(iterator)
    (folder / "b.jsonl").write_text(line("changed"))
    assert next(iterator).id == "changed"


def test_grain_composes(folder):
    ids = list(read_traces([folder]).filter(lambda item: not isinstance(item, TraceError)).map(lambda item: item.id))
    assert ids == ["x", "x#2", "y", "z"]
    assert isinstance(read_traces([folder]), grain.IterDataset)


def test_tokenised_with_errors_passed_on(folder):
    (folder / "d.json").write_text(line("refuse"))
    items = list(tokenise_traces(read_traces([folder]), ByteTokenizer()))
    assert [type(item) for item in items] == [TokenTrajectory, TokenTrajectory, TraceError] + [TokenTrajectory] * 2 + [
        TraceError
    ] * 2
    assert str(items[-1]).endswith("d.json:1: call 0: the template refuses this conversation")
    assert bytes(items[0].calls[0].prompt_ids.tolist()) == b"<user>x|<assistant>"


def test_all_broken_is_an_error_in_every_shard(tmp_path):
    (tmp_path / "a.jsonl").write_text("{\n[")
    for index in range(2):
        iterator = iter(read_traces([tmp_path], shard=Shard(index, 2)))
        assert isinstance(next(iterator), TraceError)
        with pytest.raises(TraceError, match=r"no trajectory in 1 file, 2 errors; the first: .*a.jsonl:1: "):
            next(iterator)


def test_empty_files_are_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(TraceError, match=r"1 file, 1 error; the first: .*a\.jsonl: expected JSON, got an empty file"):
        list(read_traces([tmp_path]))


def test_an_unknown_format_or_path_is_an_error_at_once(folder):
    with pytest.raises(TraceError, match=r"unknown trace format 'csv'"):
        read_traces([folder], format="csv")
    with pytest.raises(TraceError, match=r"no such file or folder"):
        read_traces([folder / "nowhere"])

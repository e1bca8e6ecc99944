import json

import numpy as np
import pytest
from byte_tokenizer import ByteTokenizer

from jaxhybrid.errors import TraceError
from jaxhybrid.traces.lineage import with_parents
from jaxhybrid.traces.tokenise import tokenise
from jaxhybrid.traces.trajectory import BlockCall, MessageCall, TextCall, Trajectory

TOKENIZER = ByteTokenizer()
ASK = {"role": "user", "content": "ask"}
THOUGHT = {"role": "assistant", "content": "yes", "reasoning_content": "hm, "}


def run(*calls, scope=""):
    return Trajectory("run", "runs.jsonl:3", "test", with_parents(calls), scope)


def text(ids):
    return bytes(ids.tolist()).decode()


def test_messages_go_through_the_template():
    tools = ({"name": "ls"},)
    call = MessageCall(messages=(ASK,), response=THOUGHT, tools=tools, branch="helper", timestamp_s=4.0)
    result = tokenise(run(call), TOKENIZER)
    assert (result.id, result.source) == ("run", "runs.jsonl:3")
    (call,) = result.calls
    head = json.dumps(list(tools))
    assert text(call.prompt_ids) == f"{head}<user>ask|<assistant>"
    assert call.turn_start == len(head) + len("<user>ask|")
    assert text(call.response_ids) == "hm, yes"
    assert (call.branch, call.parent, call.timestamp_s) == ("helper", None, 4.0)
    assert call.prompt_ids.dtype == call.response_ids.dtype == np.int32


def test_prompts_that_are_extended_are_views_of_the_last():
    history = (ASK, THOUGHT, ASK, THOUGHT, ASK)
    calls = [MessageCall(messages=history[:n], response=THOUGHT) for n in (1, 3, 5)]
    first, second, last = tokenise(run(*calls), TOKENIZER).calls
    assert text(first.prompt_ids) == "<user>ask|<assistant>"
    assert text(second.prompt_ids) == "<user>ask|<assistant>hm, yes|<user>ask|<assistant>"
    assert np.shares_memory(first.prompt_ids, last.prompt_ids)
    assert np.shares_memory(second.prompt_ids, last.prompt_ids)
    with pytest.raises(ValueError, match="read-only"):
        first.prompt_ids[0] = 0


def test_a_template_that_drops_reasoning_keeps_both_prompts_as_they_are():
    calls = [MessageCall(messages=m, response=THOUGHT) for m in ((ASK,), (ASK, THOUGHT, ASK), (ASK, THOUGHT, ASK) * 2)]
    switches = {"drop_reasoning_before_last_user": True}
    prompts = [text(call.prompt_ids) for call in tokenise(run(*calls), TOKENIZER, switches).calls]
    assert prompts[1] == "<user>ask|<assistant>yes|<user>ask|<assistant>"
    assert prompts[2].startswith("<user>ask|<assistant>yes|<user>ask|<user>ask|")


def test_the_last_message_of_a_branchs_first_call_is_where_siblings_leave():
    system, task = {"role": "system", "content": "be brief"}, {"role": "user", "content": "list the files"}
    calls = [
        MessageCall(messages=(system, ASK), response=THOUGHT),
        MessageCall(messages=(system, ASK, THOUGHT, ASK), response=THOUGHT),
        MessageCall(messages=(system, ASK, task), response=THOUGHT, branch="helper"),
        MessageCall(messages=(system, ASK, task, THOUGHT, ASK), response=THOUGHT, branch="helper"),
    ]
    made = tokenise(run(*calls), TOKENIZER).calls
    starts = [None if call.message_start is None else text(call.prompt_ids[: call.message_start]) for call in made]
    assert starts == ["<system>be brief|", None, "<system>be brief|<user>ask|", None]


def test_forks_each_extend_their_parent():
    other = {"role": "user", "content": "other"}
    calls = [MessageCall(messages=m, response=THOUGHT) for m in ((ASK,), (ASK, THOUGHT, ASK), (ASK, THOUGHT, other))]
    first, one, two = tokenise(run(*calls), TOKENIZER).calls
    assert text(one.prompt_ids).startswith(text(first.prompt_ids))
    assert text(two.prompt_ids).startswith(text(first.prompt_ids))
    assert text(two.prompt_ids).endswith("<user>other|<assistant>")
    assert two.parent == 1  # of the two with the same opening, the later


def test_text_is_encoded_as_it_is():
    (call,) = tokenise(run(TextCall(text="grüße", response_text="")), TOKENIZER).calls
    assert text(call.prompt_ids) == "grüße"
    assert call.turn_start == len(call.prompt_ids) == 7
    assert call.message_start is None
    assert call.response_ids.shape == (0,)


def test_blocks_avoid_the_tokenizers_end_and_low_ids_and_depend_on_the_seed():
    call = BlockCall(blocks=np.arange(90), block_size=64, input_length=90 * 64 + 5, output_length=700)
    once, again, other = (
        tokenise(run(call, scope="s"), TOKENIZER, first_id=11, seed=seed).calls[0] for seed in (0, 0, 1)
    )
    assert len(once.prompt_ids) == once.turn_start == 5765
    assert once.message_start is None
    assert len(once.response_ids) == 700
    ids = set(once.prompt_ids.tolist())
    assert ids == set(range(11, 256)) - {ord("|")}
    np.testing.assert_array_equal(once.prompt_ids, again.prompt_ids)
    assert (once.prompt_ids != other.prompt_ids).any()


def test_a_refused_conversation_and_an_empty_prompt_name_their_place():
    refused = MessageCall(messages=({"role": "user", "content": "refuse"},), response=THOUGHT)
    good = MessageCall(messages=(ASK,), response=THOUGHT)
    with pytest.raises(TraceError, match=r"runs.jsonl:3: call 1: the template refuses this conversation"):
        tokenise(run(good, refused), TOKENIZER)
    with pytest.raises(TraceError, match=r"runs.jsonl:3: call 0: expected a prompt, got no tokens"):
        tokenise(run(TextCall(text="", response_text="a")), TOKENIZER)

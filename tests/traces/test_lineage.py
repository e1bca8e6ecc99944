import numpy as np

from jaxhybrid.traces.lineage import MIN_SHARED_CHARACTERS, PrefixTrie, with_lines, with_parents
from jaxhybrid.traces.trajectory import BlockCall, MessageCall, TextCall


def message(role, content):
    return {"role": role, "content": content}


def parents(calls):
    return [call.parent for call in with_parents(calls)]


def blocks(*names):
    return BlockCall(blocks=np.array(names), block_size=2, input_length=2 * len(names), output_length=1)


def test_trie_gives_the_deepest_node_and_the_latest_of_the_branch_or_the_first_through_it():
    trie = PrefixTrie()
    trie.insert("abc", 0)
    trie.insert("abd", 1)
    trie.insert("abe", 2, "helper")
    assert trie.deepest("abce") == (3, 0)
    assert trie.deepest("abx") == (2, 1)
    assert trie.deepest("abx", "helper") == (2, 2)
    assert trie.deepest("abx", "another") == (2, 0)
    assert trie.deepest("x") == (0, None)


def test_message_calls_continue_fork_and_start_afresh():
    system, ask, answer = message("system", "s"), message("user", "u"), message("assistant", "a")
    more = message("user", "v")
    calls = [
        MessageCall(messages=(system, ask), response=answer),
        MessageCall(messages=(system, ask, answer, more), response=answer),
        MessageCall(messages=(message("system", "other"), ask), response=answer, branch="sub"),
        MessageCall(messages=(system, ask, answer, message("user", "w")), response=answer),  # a fork after call 0
        MessageCall(messages=(system, ask, answer, more, answer, more), response=answer),
    ]
    # Call 1's prompt and call 0's prompt and response share the same opening with call 3: the latest counts.
    assert parents(calls) == [None, 0, None, 1, 1]


def test_sub_agents_fork_from_their_spawner_not_from_each_other():
    ask, answer = message("user", "u"), message("assistant", "a")
    calls = [
        MessageCall(messages=(ask,), response=answer),
        MessageCall(messages=(ask, message("user", "one")), response=answer, branch="one"),
        MessageCall(messages=(ask, message("user", "two")), response=answer, branch="two"),
        MessageCall(messages=(ask, answer, ask), response=answer),
    ]
    assert parents(calls) == [None, 0, 0, 0]


def test_other_tools_make_another_context():
    ask, answer = message("user", "u"), message("assistant", "a")
    calls = [
        MessageCall(messages=(ask,), response=answer, tools=({"name": "ls"},)),
        MessageCall(messages=(ask, answer, ask), response=answer, tools=({"name": "rm"},)),
    ]
    assert parents(calls) == [None, None]


def test_dropped_reasoning_still_finds_the_call_before():
    ask = message("user", "u")
    thought = {**message("assistant", "a"), "reasoning_content": "because"}
    calls = [
        MessageCall(messages=(ask,), response=thought),
        MessageCall(messages=(ask, message("assistant", "a"), ask), response=thought),
    ]
    assert parents(calls) == [None, 0]


def test_block_calls_take_the_longest_shared_run_and_the_latest_of_equals():
    calls = [blocks(1, 2, 3), blocks(1, 2, 3, 4), blocks(1, 2, 9), blocks(1, 2, 3, 5), blocks(7)]
    assert parents(calls) == [None, 0, 1, 1, None]


def test_text_calls_need_more_than_a_greeting_in_common():
    head = "x" * MIN_SHARED_CHARACTERS
    texts = [head, head + "one", head[1:] + "-", head + "one two", head + "other", head + "one"]
    assert parents([TextCall(text=text, response_text="") for text in texts]) == [None, 0, None, 1, 3, 3]


def test_a_short_prompt_is_continued_by_one_that_begins_with_all_of_it():
    texts = ["Hi!", "Hi there", "Hi!\nA table for two.", "Hi!\nA table", "Hi!\nA table for two.\nToday."]
    assert parents([TextCall(text=text, response_text="") for text in texts]) == [None, None, 0, 0, 2]


def test_every_conversation_of_a_log_without_names_is_a_line_of_its_own():
    texts = ["Hi!", "I need a table.", "Hi!\nFor two.", "I need a table.\nWhen?", "Sum up.", "Hi!\nFor two.\nNow."]
    calls = with_lines(with_parents([TextCall(text=text, response_text="") for text in texts]))
    assert [call.branch for call in calls] == ["main", "line-2", "main", "line-2", "line-3", "main"]

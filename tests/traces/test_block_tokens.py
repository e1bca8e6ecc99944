import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxhybrid.errors import TokenError
from jaxhybrid.traces.block_tokens import TokenSource, block_token_ids
from jaxhybrid.traces.trajectory import BlockCall

SIZE = 8
SOURCE = TokenSource("scope", first_id=3, vocab_size=5000, excluded=(2, 40, 41))


def call(names, length, out=0, parent=None):
    return BlockCall(
        blocks=np.array(names, np.int64), block_size=SIZE, input_length=length, output_length=out, parent=parent
    )


def prompts(*calls):
    return [prompt for prompt, _ in block_token_ids(calls, SOURCE, "run")]


def responses(*calls):
    return [response for _, response in block_token_ids(calls, SOURCE, "run")]


class TestSource:
    @given(
        first=st.integers(0, 20),
        choices=st.integers(1, 30),
        holes=st.sets(st.integers(0, 60), max_size=5),
        names=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
        length=st.integers(0, 40),
    )
    def test_ids_stay_in_range_and_out_of_the_holes(self, first, choices, holes, names, length):
        allowed = set(range(first, first + choices)) - holes
        if not allowed:
            with pytest.raises(TokenError, match=r"expected ids in \[first_id, vocab_size\)"):
                TokenSource("s", first, first + choices, tuple(holes))
            return
        ids = TokenSource("s", first, first + choices, tuple(holes)).draw("block", np.array(names, np.int64), length)
        assert ids.dtype == np.int32
        assert len(ids) == len(names) * length
        assert set(ids.tolist()) <= allowed

    def test_every_id_is_drawn_about_equally_often(self):
        ids = TokenSource("s", 3, 13, (5,)).draw("block", np.arange(300), 60)
        counts = np.bincount(ids, minlength=13)
        assert counts[[0, 1, 2, 5]].sum() == 0
        # 18,000 draws of 9: mean 2,000, standard deviation 42.
        np.testing.assert_allclose(counts[[3, 4, *range(6, 13)]], 2000, atol=5 * 42)

    def test_same_name_same_ids_and_all_else_different(self):
        names = np.array([7, 8])
        ids = SOURCE.draw("block", names, SIZE)
        np.testing.assert_array_equal(ids[SIZE:], SOURCE.draw("block", np.array([8]), SIZE))
        others = [
            SOURCE.draw("part", names, SIZE),
            TokenSource("other", 3, 5000).draw("block", names, SIZE),
            TokenSource("scope", 3, 5000, (2, 40, 41), seed=1).draw("block", names, SIZE),
            SOURCE.draw("block", names[::-1].copy(), SIZE),
        ]
        assert all((ids == other).mean() < 0.2 for other in others)

    def test_ids_are_the_same_on_every_machine(self):
        assert TokenSource("s", 0, 4096).draw("block", np.array([1]), 4).tolist() == [336, 4048, 2041, 131]


class TestCalls:
    def test_a_prompt_shares_exactly_the_blocks_it_names(self):
        one, two = prompts(call([1, 2, 3], 27), call([1, 2, 4], 26))
        assert (len(one), len(two)) == (27, 26)
        np.testing.assert_array_equal(one[:16], two[:16])
        assert (one[16:24] != two[16:24]).any()

    def test_the_next_prompt_is_prompt_response_and_new_input(self):
        calls = call([1, 2], 19, out=10), call([1, 2, 3, 4], 37, out=4, parent=0)
        (first, second), (response, _) = prompts(*calls), responses(*calls)
        np.testing.assert_array_equal(second[:19], first)
        np.testing.assert_array_equal(second[19:29], response)
        np.testing.assert_array_equal(second[16:32], SOURCE.draw("block", np.array([3, 4]), SIZE)[:16])
        assert first.base is second.base or first.base is second

    def test_a_chain_keeps_one_array(self):
        calls = [call([1], 11, 2), call([1], 14, 1, 0), call([1, 2], 17, 5, 1)]
        first, middle, last = prompts(*calls)
        assert np.shares_memory(first, last)
        assert np.shares_memory(middle, last)

    def test_a_response_too_long_for_the_next_prompt_was_rewritten(self):
        calls = call([1, 2], 19, out=10), call([1, 2, 3], 28, parent=0)
        second, response = prompts(*calls)[1], responses(*calls)[0]
        assert len(response) == 10
        assert (second[19:28] != response[:9]).any()

    def test_a_prompt_that_diverges_in_its_last_full_block_is_not_extended(self):
        calls = call([1, 2], 16, out=2), call([1, 9, 3], 24, parent=0)
        (first, second), response = prompts(*calls), responses(*calls)[0]
        np.testing.assert_array_equal(first[:8], second[:8])
        assert (first[8:] != second[8:16]).any()
        assert (response != second[16:18]).any()

    def test_the_name_of_a_partial_block_does_not_stop_an_extension(self):
        one, two, three = prompts(call([1, 50], 13), call([1, 2, 51], 21, parent=0), call([1, 52], 13, parent=0))
        np.testing.assert_array_equal(two[:13], one)
        # Another name for the same partial block is other content.
        assert (three[8:] != one[8:]).any()

    def test_equal_partial_blocks_that_nothing_extends_are_equal(self):
        one, two = prompts(call([1, 50], 13), call([1, 50], 13))
        np.testing.assert_array_equal(one, two)

    def test_the_first_of_two_branches_gets_the_tail(self):
        parent, one, two = prompts(call([1], 12), call([1, 2], 16, parent=0), call([1, 3], 16, parent=0))
        np.testing.assert_array_equal(one[:12], parent)
        assert (two[8:12] != parent[8:]).any()

    def test_prompts_longer_than_their_names_have_a_steady_tail(self):
        one, two = prompts(call([1], 30), call([1], 30))
        np.testing.assert_array_equal(one, two)
        (alone,) = prompts(call([], 5))
        assert len(alone) == 5

    def test_responses_differ_by_call_and_by_run(self):
        first, second = responses(call([1], 8, out=9), call([1], 8, out=9))
        assert (first != second).any()
        ((_, other),) = block_token_ids([call([1], 8, out=9)], SOURCE, "another run")
        assert (first != other).any()

    def test_arrays_are_read_only(self):
        calls = call([1], 9, out=2), call([1, 2], 16, parent=0)
        for array in [*prompts(*calls), *responses(*calls)]:
            with pytest.raises(ValueError, match="read-only"):
                array[:1] = 0

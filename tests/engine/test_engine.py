"""What users of an engine rely on, one promise a test."""

import dataclasses

import numpy as np
import pytest

import jaxhybrid as jh
from jaxhybrid.engine.sequence import Reuse
from jaxhybrid.errors import BusyError, CapacityError, ConfigError, ReleasedError, TokenError

CONFIG = jh.EngineConfig(
    max_sequences=4, max_tokens=1024, max_context=256, page_size=8, max_checkpoints=12, prefill_chunks=(5, 32),
    steps_per_dispatch=4, retention=jh.Retention(), poison=True,
)  # fmt: skip
RNG = np.random.default_rng(5)
PROMPT = RNG.integers(2, 61, 70).tolist()


@pytest.fixture
def engine(tiny_model: jh.Model, shared_programs) -> jh.Engine:
    return shared_programs(tiny_model, CONFIG)


@pytest.fixture(scope="module")
def shared_programs():
    """Engines that start empty but compile nothing again."""
    compiled: dict = {}

    def make(model: jh.Model, config: jh.EngineConfig) -> jh.Engine:
        made = jh.Engine(model, config)
        sizes = (config.max_sequences, config.max_tokens, config.page_size, config.max_checkpoints, config.max_context)
        made._programs._compiled = compiled.setdefault(sizes, {})
        return made

    return make


def alone(model: jh.Model, tokens) -> np.ndarray:
    return np.asarray(jh.forward(model, tokens))[-1]


def test_turn_start_prompt_end_and_response_end_are_resume_points(engine: jh.Engine) -> None:
    first = engine.prefill(PROMPT, turn_start=60)
    made = engine.generate([first], jh.Sampling(max_tokens=9))[0]
    stripped = engine.prefill([*PROMPT[:60], 1, 1, 1])
    assert (stripped.reuse.matched, stripped.reuse.resumed, stripped.reuse.gap) == (60, 60, 0)
    again = engine.prefill(PROMPT)
    assert again.reuse.resumed == 70
    longer = engine.prefill([*PROMPT, *made.tokens, 3, 4])
    assert longer.reuse.resumed == 79
    assert engine.stats().events.checkpoints == {"turn_start": 1, "prompt_end": 3, "response_end": 1}


def test_without_response_end_the_gap_is_the_response(tiny_model: jh.Model, shared_programs) -> None:
    config = dataclasses.replace(CONFIG, retention=jh.Retention(response_end=False))
    engine = shared_programs(tiny_model, config)
    first = engine.prefill(PROMPT)
    made = engine.generate([first], jh.Sampling(max_tokens=9))[0]
    reuse = engine.prefill([*PROMPT, *made.tokens, 3, 4]).reuse
    assert (reuse.matched, reuse.resumed, reuse.gap, reuse.limited_by) == (79, 70, 9, "recurrent")


def test_the_third_request_resumes_at_the_junction(engine: jh.Engine) -> None:
    engine.prefill([*PROMPT, 9, 9]).release()
    second = engine.prefill([*PROMPT[:50], 8, 8])
    assert (second.reuse.matched, second.reuse.resumed, second.reuse.limited_by) == (50, 0, "recurrent")
    third = engine.prefill([*PROMPT[:50], 7, 7, 7])
    assert (third.reuse.matched, third.reuse.resumed, third.reuse.gap) == (50, 50, 0)
    assert np.allclose(third.logits(), alone(engine.model, third.tokens), atol=2e-4)


def test_the_second_sibling_resumes_at_the_message_that_tells_them_apart(engine: jh.Engine) -> None:
    engine.prefill([*PROMPT[:50], 4, 4, 4, 9, 9], turn_start=54, message_start=50).release()
    second = engine.prefill([*PROMPT[:50], 4, 4, 4, 8, 8, 8, 8], turn_start=56, message_start=50)
    assert (second.reuse.matched, second.reuse.resumed, second.reuse.gap) == (53, 50, 3)
    assert np.allclose(second.logits(), alone(engine.model, second.tokens), atol=2e-4)
    assert engine.stats().events.checkpoints == {"message_start": 1, "junction": 1, "turn_start": 2, "prompt_end": 2}


@pytest.mark.parametrize("name", ["turn_start", "message_start"])
def test_a_start_beyond_the_prompt_is_refused(engine: jh.Engine, name: str) -> None:
    with pytest.raises(TokenError, match=f"{name} must be 0 to 70, got 71"):
        engine.prefill(PROMPT, **{name: 71})
    assert engine.stats().live_sequences == 0


def test_a_rewritten_response_is_put_down_to_the_template(engine: jh.Engine) -> None:
    first = engine.prefill(PROMPT, trajectory="run", turn_start=66)
    made = engine.generate([first], jh.Sampling(max_tokens=6))[0]
    rewritten = (made.tokens[2] + 1) % 60
    second = engine.prefill([*PROMPT, *made.tokens[:2], rewritten, 5], trajectory="run", turn_start=73)
    assert second.reuse.limited_by == "template"
    assert second.reuse.differing == (72, made.tokens[2], rewritten)
    assert second.reuse.resumed == 70
    third = engine.prefill([*PROMPT[:40], 2, 2], trajectory="run", turn_start=41)
    assert third.reuse.limited_by == "context_edit"
    other_branch = engine.prefill([*PROMPT[:66], 2, 2], trajectory="run", branch="helper", turn_start=67)
    assert other_branch.reuse.limited_by == "none"


def test_tenants_share_nothing(engine: jh.Engine) -> None:
    engine.prefill(PROMPT, tenant="a").release()
    assert engine.prefill(PROMPT, tenant="b").reuse.matched == 0
    assert engine.prefill(PROMPT, tenant="a").reuse.resumed == 70


def test_fork_checkpoint_and_resume_move_no_bytes(engine: jh.Engine) -> None:
    parent = engine.prefill(PROMPT)
    before = engine.stats()
    children = [parent.fork() for _ in range(3)]
    mark = parent.checkpoint(pin=True)
    resumed = engine.resume(mark)
    after = engine.stats()
    assert (after.kv_bytes_copied, after.state_moves) == (before.kv_bytes_copied, before.state_moves)
    engine.generate(children, jh.Sampling(max_tokens=1))
    page = engine._memory.pool.page_bytes
    assert engine.stats().kv_bytes_copied - after.kv_bytes_copied <= len(children) * page
    assert engine.stats().recurrent_bytes_copied == 0
    assert np.array_equal(parent.logits(), resumed.logits())


def test_a_restored_bundle_is_bit_exact(engine: jh.Engine) -> None:
    parent = engine.prefill(PROMPT)
    mark = parent.checkpoint(pin=True)
    first = engine.generate([parent], jh.Sampling(max_tokens=12))[0]
    second = engine.generate([engine.resume(mark)], jh.Sampling(max_tokens=12))[0]
    assert first == second


def test_sequences_join_and_leave_between_dispatches(engine: jh.Engine) -> None:
    jobs = [engine.submit(PROMPT[: 20 + 11 * n], sampling=jh.Sampling(max_tokens=3 + 4 * n)) for n in range(6)]
    finished: list = []
    while len(finished) < len(jobs):
        finished += engine.step()
    for number, job in enumerate(jobs):
        made = job.generation.tokens
        assert len(made) == 3 + 4 * number
        tokens = PROMPT[: 20 + 11 * number]
        for token in made:
            assert token == int(alone(engine.model, tokens).argmax())
            tokens = [*tokens, token]


def test_a_second_identical_run_compiles_nothing(tiny_model: jh.Model) -> None:
    engine = jh.Engine(tiny_model, CONFIG)

    def run(tenant: str) -> None:
        parents = [engine.prefill(PROMPT[:n], tenant=tenant) for n in (13, 41)]
        children = [parent.fork() for parent in parents]
        engine.generate([*parents, *children], jh.Sampling(max_tokens=6))
        engine.generate(children[:1], jh.Sampling(max_tokens=3, temperature=0.7, top_k=5))

    run("first")
    compiled = engine.stats().compiled_programs
    assert compiled > 0
    run("second")
    assert engine.stats().compiled_programs == compiled


def test_warm_up_leaves_no_trace_and_only_copying_to_compile(tiny_model: jh.Model) -> None:
    engine = jh.Engine(tiny_model, CONFIG)
    engine.warm_up(rows=(1, 2))
    stats = engine.stats()
    assert (stats.live_slots, stats.live_pages) == (0, 0)
    sequences = [engine.prefill(PROMPT[:n]) for n in (13, 41)]
    engine.generate(sequences, jh.Sampling(max_tokens=6))
    assert engine.stats().kv_bytes_copied > 0  # the longer prompt began with the shorter one's half-filled page
    assert engine.stats().compiled_programs == stats.compiled_programs + 1
    assert np.allclose(sequences[0].logits(), alone(engine.model, sequences[0].tokens), atol=2e-4)


def test_stop_tokens_end_a_sequence_before_themselves(engine: jh.Engine) -> None:
    free = engine.generate([engine.prefill(PROMPT)], jh.Sampling(max_tokens=20))[0]
    stop = free.tokens[7]
    first_at = free.tokens.index(stop)
    sequence = engine.prefill(PROMPT)
    made = engine.generate([sequence], jh.Sampling(max_tokens=20, stop_token_ids=(stop,)))[0]
    assert made.finish_reason == "stop"
    assert made.tokens == free.tokens[:first_at]
    assert sequence.length == 70 + first_at


def test_scoring_gives_the_log_probability_of_every_token(engine: jh.Engine) -> None:
    sequence = engine.prefill(PROMPT[:20])
    scores = engine.score(sequence, PROMPT[20:])
    logits = np.asarray(jh.forward(engine.model, PROMPT), np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = log_probs[np.arange(19, 69), PROMPT[20:]]
    assert np.allclose(scores, expected, atol=2e-4)


def test_least_recently_used_checkpoints_go_first(tiny_model: jh.Model, shared_programs) -> None:
    engine = shared_programs(tiny_model, dataclasses.replace(CONFIG, max_sequences=2, max_checkpoints=2))
    for start in range(3):
        engine.prefill([start + 2, *PROMPT[:30]]).release()
    engine.prefill([2, *PROMPT[:30]]).release()  # used again
    engine.prefill([40, *PROMPT[:30]]).release()
    engine.prefill([41, *PROMPT[:30]]).release()
    assert engine.stats().events.evictions > 0
    assert engine.prefill([2, *PROMPT[:30]]).reuse.gap == 0
    assert engine.prefill([3, *PROMPT[:30]]).reuse.resumed == 0


def test_pinned_checkpoints_outlast_pressure(tiny_model: jh.Model, shared_programs) -> None:
    engine = shared_programs(tiny_model, dataclasses.replace(CONFIG, max_sequences=2, max_checkpoints=2))
    sequence = engine.prefill(PROMPT)
    mark = sequence.checkpoint(pin=True)
    sequence.release()
    for start in range(6):
        engine.prefill([start + 2, *PROMPT[:30]]).release()
    assert mark.alive
    assert engine.resume(mark).tokens.tolist() == PROMPT
    mark.release()
    with pytest.raises(ReleasedError, match="holds no pin"):
        mark.release()


def test_what_can_not_fit_is_refused_and_others_go_on(tiny_model: jh.Model, shared_programs) -> None:
    engine = shared_programs(tiny_model, dataclasses.replace(CONFIG, max_tokens=256))
    held = engine.prefill(PROMPT)
    child = held.fork()
    engine.extend(child, PROMPT)
    with pytest.raises(CapacityError, match=r"more tokens after \d+ need \d+ slots and \d+ pages of 8, free are"):
        engine.prefill([3, *PROMPT, *PROMPT, *PROMPT[:60]])
    assert engine.stats().events.refusals == 1
    assert np.allclose(held.logits(), alone(engine.model, PROMPT), atol=2e-4)
    child.release()
    assert engine.prefill([3, *PROMPT, *PROMPT[:30]]).length == 101


def test_a_failed_extension_leaves_the_sequence_as_it_was(tiny_model: jh.Model, shared_programs) -> None:
    engine = shared_programs(tiny_model, dataclasses.replace(CONFIG, max_tokens=256))
    held, other = engine.prefill(PROMPT), engine.prefill([4, *PROMPT])
    before = held.logits()
    with pytest.raises(CapacityError, match="pages of 8"):
        engine.extend(held, [*PROMPT, *PROMPT[:50]])
    assert held.tokens.tolist() == PROMPT
    assert np.array_equal(held.logits(), before)
    assert other.length == 71


def test_later_requests_give_way_and_come_back(tiny_model: jh.Model, shared_programs) -> None:
    """Three responses that fit one at a time: the later ones are preempted and end with the same tokens."""
    engine = shared_programs(tiny_model, dataclasses.replace(CONFIG, max_tokens=256))
    prompts = [[start + 2, *PROMPT[:60]] for start in range(3)]
    jobs = [engine.submit(prompt, sampling=jh.Sampling(max_tokens=40)) for prompt in prompts]
    while any(job.phase != "done" for job in jobs):
        for job in engine.step():
            assert job.error is None
            job.sequence.release()
    assert engine.stats().events.preemptions > 0
    tokens = engine.stats().tokens  # each prompt and response counts once
    assert (tokens.calls, tokens.prompt, tokens.reused, tokens.gap) == (3, 3 * 61, 0, 0)
    assert tokens.generated == sum(len(job.generation.tokens) for job in jobs)
    assert [job.sequence.reuse for job in jobs] == [Reuse(0, 0, "cold")] * 3
    for prompt, job in zip(prompts, jobs, strict=True):
        fresh = engine.prefill(prompt, tenant="check")
        assert engine.generate([fresh], jh.Sampling(max_tokens=40))[0].tokens == job.generation.tokens
        fresh.release()
        engine.delete(tenant="check")


def test_a_response_set_aside_while_it_is_scored_is_scored_whole_and_once(
    tiny_model: jh.Model, shared_programs
) -> None:
    engine = shared_programs(tiny_model, dataclasses.replace(CONFIG, max_checkpoints=0))
    job = engine.submit(PROMPT[:31], scored=PROMPT)
    while len(job.scores) < 32:
        engine.step()
    engine._preempt(job)  # as a request before it does that runs out of pages
    for checkpoint in list(engine._memory.index):
        engine._memory.pool.release(engine._memory.index.remove(checkpoint))  # and takes those of what was set aside
    while job.phase != "done":
        engine.step()
    assert engine.stats().tokens.generated == len(PROMPT)
    job.sequence.release()
    fresh = engine.prefill(PROMPT[:31], tenant="check")
    np.testing.assert_allclose(job.scores, engine.score(fresh, PROMPT), atol=1e-4)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "non-empty list of token ids"),
        ([3, 61], "token id 61 at position 1 is outside 0 to 60"),
        ([3, -1], "token id -1 at position 1"),
        ([0.5], "expected integer token ids"),
        ([[1, 2]], r"got shape \(1, 2\)"),
        ([3] * 257, "257 tokens are more than the 256"),
    ],
)
def test_bad_tokens_are_refused_and_cost_nothing(engine: jh.Engine, ids: list, message: str) -> None:
    with pytest.raises(TokenError, match=message):
        engine.prefill(ids)
    stats = engine.stats()
    assert (stats.live_slots, stats.live_sequences) == (0, 0)
    assert engine.prefill([3, 4]).length == 2


def test_a_response_past_the_context_is_refused_before_it_starts(engine: jh.Engine) -> None:
    sequence = engine.prefill(PROMPT)
    with pytest.raises(TokenError, match="270 tokens with the response are more than max_context=256"):
        engine.generate([sequence], jh.Sampling(max_tokens=200))
    assert sequence.length == 70


def test_released_sequences_say_so(engine: jh.Engine) -> None:
    sequence = engine.prefill(PROMPT)
    sequence.release()
    for use in (sequence.logits, sequence.fork, sequence.checkpoint, lambda: engine.extend(sequence, [3])):
        with pytest.raises(ReleasedError, match="this sequence of 70 tokens was released"):
            use()


def test_deleting_a_trajectory_forgets_it(engine: jh.Engine) -> None:
    sequence = engine.prefill(PROMPT, trajectory="run-7")
    assert engine.delete(trajectory="run-7") == 1
    with pytest.raises(ReleasedError, match="was released"):
        sequence.logits()
    assert engine.prefill(PROMPT).reuse.matched == 0
    with pytest.raises(TokenError, match="a trajectory or a tenant"):
        engine.delete()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_sequences": 0}, "max_sequences must be at least 1, got 0"),
        ({"prefill_chunks": (16, 5)}, r"prefill_chunks must be ascending positive counts, got \(16, 5\)"),
        ({"row_buckets": (1, 2)}, r"row_buckets must reach max_sequences=8, got \(1, 2\)"),
        ({"max_context": 2000, "max_tokens": 1000}, "max_context must be 1 to max_tokens=1000, got 2000"),
        ({"max_checkpoints": -1}, "max_checkpoints must be at least 0"),
    ],
)
def test_bad_sizes_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        jh.EngineConfig(**options)


def test_one_sequence_is_not_continued_twice_at_once(engine: jh.Engine) -> None:
    sequence = engine.prefill(PROMPT)
    with pytest.raises(BusyError, match="the same sequence was given twice"):
        engine.generate([sequence, sequence], jh.Sampling(max_tokens=3))
    with pytest.raises(ConfigError, match="expected 1 sampling options, one for each sequence, got 2"):
        engine.generate([sequence], [jh.Sampling(), jh.Sampling()])
    job = engine.submit([3, *PROMPT], sampling=jh.Sampling(max_tokens=9))
    for use in (lambda: engine.extend(job.sequence, [3]), job.sequence.release):
        with pytest.raises(BusyError, match="is being worked on"):
            use()
    while job.phase != "done":
        engine.step()
    job.sequence.release()
    assert len(engine.generate([sequence], jh.Sampling(max_tokens=3))[0].tokens) == 3
    sequence.release()
    engine.delete(tenant="default")
    assert engine.stats().live_slots == engine.stats().live_pages == 0


def test_one_refused_sequence_leaves_none_queued(engine: jh.Engine) -> None:
    short, long = engine.prefill(PROMPT[:20]), engine.prefill([*PROMPT, *PROMPT, *PROMPT])
    with pytest.raises(TokenError, match="more than max_context=256"):
        engine.generate([short, long], jh.Sampling(max_tokens=60))
    assert short.length == 20
    assert len(engine.generate([short], jh.Sampling(max_tokens=3))[0].tokens) == 3


def test_deleting_reaches_requests_that_still_wait(engine: jh.Engine) -> None:
    jobs = [engine.submit([start, *PROMPT], trajectory="run-7") for start in range(3, 9)]
    engine.step()
    engine.delete(trajectory="run-7")
    assert all(isinstance(job.error, ReleasedError) for job in jobs if job.sequence.length < 71)
    assert engine.step() == []
    assert engine.stats().live_slots == engine.stats().live_pages == 0
    assert engine.prefill(PROMPT).length == 70

"""The choice of a token against its definition in numpy, and through the engine."""

import dataclasses
import math

import numpy as np
import pytest

import jaxhybrid as jh
from jaxhybrid.engine.sampling import SamplingControls, SamplingMode, choose_tokens
from jaxhybrid.errors import ConfigError

VOCAB = 23
RNG = np.random.default_rng(3)
LOGITS = RNG.normal(size=VOCAB).astype(np.float32) * 0.8
DRAWS = 6000


def choose(logits: np.ndarray, rows: list[jh.Sampling], positions, seen=None, made=None) -> np.ndarray:
    controls = SamplingControls.of(rows, len(rows), stop_width=1)
    return np.asarray(choose_tokens(logits, controls, SamplingMode.of(rows), np.asarray(positions), seen, made))


def draws(logits: np.ndarray, **options) -> np.ndarray:
    """Tokens drawn for DRAWS positions of one seed."""
    rows = [jh.Sampling(seed=5, **options)] * DRAWS
    return choose(np.broadcast_to(logits, (DRAWS, logits.size)), rows, np.arange(DRAWS))


def distribution(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Best first: the top k; of what is left the fewest that reach top_p together, if at least min_p of the best."""
    weights = np.exp(logits.astype(np.float64) / temperature)
    order = np.argsort(-weights, kind="stable")
    kept = order[: top_k or None]
    share = weights[kept] / weights[kept].sum()
    reached = np.concatenate([[0.0], np.cumsum(share)[:-1]])
    kept = kept[(reached < top_p) & (share >= min_p * share[0])]
    probabilities = np.zeros(logits.size)
    probabilities[kept] = weights[kept] / weights[kept].sum()
    return probabilities


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    logits = np.array([[0.1, 2.0, 2.0, -1.0], [3.0, 2.0, 2.0, 3.5]], np.float32)
    assert choose(logits, [jh.Sampling()] * 2, [4, 9]).tolist() == [1, 3]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 5},
        {"top_p": 0.7},
        {"min_p": 0.35},
        {"top_k": 1},
        {"top_p": 1e-6},
        {"min_p": 1.0},
        {"top_k": 9, "top_p": 0.8, "min_p": 0.3},
        {"temperature": 1.4, "top_k": 12, "top_p": 0.6},
        {"temperature": 0.7, "top_p": 0.9, "min_p": 0.2},
        {"top_k": VOCAB + 7},
    ],
)
def test_draws_have_the_support_and_the_frequencies_of_the_definition(options: dict) -> None:
    expected = distribution(LOGITS, **options)
    counts = np.bincount(draws(LOGITS, **{"temperature": 1.0, **options}), minlength=VOCAB)
    assert not counts[expected == 0].any()
    # What is drawn less than ten times in the mean may be missed; everything else has to be there.
    assert counts[expected * DRAWS > 10].all()
    spread = np.sqrt(expected * (1 - expected) / DRAWS)
    assert np.all(np.abs(counts / DRAWS - expected) <= 5 * spread + 1e-9)


def test_a_nucleus_that_is_reached_exactly_takes_no_more() -> None:
    assert set(draws(np.array([-90.0, 0.0, 0.0, -90.0], np.float32), temperature=1.0, top_p=0.5).tolist()) == {1}


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    rows = [jh.Sampling(temperature=1.0, seed=seed) for seed in (1, 1, 2, 1)]
    logits = np.broadcast_to(np.zeros(500, np.float32), (4, 500))
    positions = np.array([7, 8, 7, 7])
    together = choose(logits, rows, positions)
    assert together[0] == together[3]
    assert len({together[0], together[1], together[2]}) == 3
    order = [2, 0, 3, 1]
    assert choose(logits, [rows[i] for i in order], positions[order]).tolist() == together[order].tolist()
    for row, position, token in zip(rows, positions, together, strict=True):
        assert choose(logits[:1], [row], [position]).tolist() == [token]


def test_other_rows_options_change_no_row() -> None:
    plain = [jh.Sampling(), jh.Sampling(temperature=0.9, seed=4), jh.Sampling(temperature=1.3, seed=2**32 - 1)]
    logits = RNG.normal(size=(4, VOCAB)).astype(np.float32)
    filtered = jh.Sampling(temperature=1.1, top_k=3, top_p=0.9, seed=1, presence_penalty=1.0)
    counts = RNG.integers(0, 3, (4, VOCAB)).astype(np.int32)
    mixed = choose(logits, [*plain, filtered], [3, 4, 5, 6], counts, counts)
    for number, row in enumerate(plain):
        alone = choose(logits[number : number + 1], [row], [3 + number])
        assert alone.tolist() == [mixed[number]]


def test_filters_and_temperature_leave_a_greedy_row_greedy() -> None:
    logits = RNG.normal(size=(2, VOCAB)).astype(np.float32)
    rows = [jh.Sampling(temperature=0.0, top_k=2, top_p=0.5), jh.Sampling(temperature=2.0)]
    for position in range(50):
        assert choose(logits, rows, [position] * 2)[0] == logits[0].argmax()


def penalised(logits: np.ndarray, seen: np.ndarray, made: np.ndarray, row: jh.Sampling) -> np.ndarray:
    """Token by token, as the papers and the usual servers define them."""
    changed = logits.astype(np.float64).copy()
    for token in range(logits.size):
        if seen[token]:
            scale = 1 / row.repetition_penalty if changed[token] > 0 else row.repetition_penalty
            changed[token] *= scale
        changed[token] -= row.presence_penalty * bool(made[token]) + row.frequency_penalty * made[token]
    return changed


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.5},
        {"presence_penalty": 0.9},
        {"frequency_penalty": 0.4},
        {"presence_penalty": -0.7, "frequency_penalty": -0.2},
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    ],
)
def test_penalties_are_exact(options: dict) -> None:
    """The penalised order of all tokens, read off by raising one token at a time until it is chosen."""
    row = jh.Sampling(**options)
    made = RNG.integers(0, 4, VOCAB).astype(np.int32) * RNG.integers(0, 2, VOCAB).astype(np.int32)
    seen = made + RNG.integers(0, 2, VOCAB).astype(np.int32)
    base = penalised(LOGITS, seen, made, row)
    # Tokens nobody saw are untouched, so token 0 is a scale: it is chosen above every other's penalised score alone.
    made[0] = seen[0] = 0
    for token in range(1, VOCAB):
        for offset, winner in ((1e-3, 0), (-1e-3, token)):
            logits = np.full((1, VOCAB), -50.0, np.float32)
            logits[0, token] = LOGITS[token]
            logits[0, 0] = base[token] + offset
            assert choose(logits, [row], [1], seen[None], made[None]).tolist() == [winner]


def test_penalties_come_before_temperature_and_filters() -> None:
    logits = np.array([2.0, 1.9, 0.0, -1.0], np.float32)
    seen = made = np.array([1, 0, 0, 0], np.int32)
    rows = [jh.Sampling(temperature=0.5, top_k=1, repetition_penalty=1.5, seed=seed) for seed in range(20)]
    drawn = choose(np.tile(logits, (20, 1)), rows, np.arange(20), np.tile(seen, (20, 1)), np.tile(made, (20, 1)))
    assert drawn.tolist() == [1] * 20


def test_controls_are_padded_with_greedy_rows_that_never_stop() -> None:
    rows = [jh.Sampling(temperature=0.5, stop_token_ids=(4, 7), seed=9), jh.Sampling(stop_token_ids=(3,), top_k=2)]
    controls = SamplingControls.of(rows, size=4, stop_width=3)
    assert np.asarray(controls.stop_token_ids).tolist() == [[4, 7, -1], [3, -1, -1], [-1] * 3, [-1] * 3]
    assert np.asarray(controls.temperature).tolist() == [0.5, 0, 0, 0]
    assert np.asarray(controls.top_k).tolist() == [0, 2, 0, 0]
    assert np.asarray(controls.seed).tolist() == [9, 0, 0, 0]
    assert np.asarray(controls.top_p).tolist() == [1] * 4


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ([jh.Sampling()], (False, False, False)),
        ([jh.Sampling(temperature=1.0)], (True, False, False)),
        ([jh.Sampling(top_k=3, top_p=0.5)], (False, False, False)),  # greedy: a filter keeps the largest
        ([jh.Sampling(), jh.Sampling(temperature=1.0, top_k=3)], (True, True, False)),
        ([jh.Sampling(temperature=1.0, top_p=0.9)], (True, True, False)),
        ([jh.Sampling(temperature=1.0, min_p=0.1)], (True, True, False)),
        ([jh.Sampling(repetition_penalty=1.1)], (False, False, True)),
        ([jh.Sampling(presence_penalty=-0.1)], (False, False, True)),
        ([jh.Sampling(), jh.Sampling(frequency_penalty=0.1)], (False, False, True)),
    ],
)
def test_a_mode_has_the_parts_some_row_needs(rows: list[jh.Sampling], parts: tuple[bool, ...]) -> None:
    assert dataclasses.astuple(SamplingMode.of(rows)) == parts


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"top_k": -1}, "top_k=-1"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.01}, "top_p=1.01"),
        ({"min_p": 1.5}, "min_p=1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty=inf"),
        ({"presence_penalty": math.nan}, "presence_penalty=nan"),
        ({"frequency_penalty": math.inf}, "frequency_penalty=inf"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**32}, "seed=4294967296"),
        ({"stop": ("a", "")}, "stop=('a', '')"),
        ({"stop": "end"}, "stop='end'"),
        ({"top_k": -2, "seed": -3}, "top_k=-2, seed=-3"),
    ],
)
def test_options_out_of_range_are_named(options: dict, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        jh.Sampling(**options)
    assert str(caught.value) == f"sampling options out of range: {named}"


# Through the engine

CONFIG = jh.EngineConfig(
    max_sequences=4, max_tokens=512, max_context=128, page_size=8, max_checkpoints=6, prefill_chunks=(16,),
    row_buckets=(1, 4), steps_per_dispatch=4,
)  # fmt: skip
SAMPLED = jh.Sampling(max_tokens=19, temperature=1.0, top_p=0.95, seed=11)
PROMPTS = [RNG.integers(2, 61, size).tolist() for size in (9, 21, 30, 13)]


@pytest.fixture(scope="module")
def alone(tiny_model: jh.Model) -> tuple[int, ...]:
    engine = jh.Engine(tiny_model, CONFIG)
    return engine.generate([engine.prefill(PROMPTS[0])], SAMPLED)[0].tokens


def test_a_seeded_response_is_the_same_in_a_batch(tiny_model: jh.Model, alone: tuple[int, ...]) -> None:
    engine = jh.Engine(tiny_model, CONFIG)
    options = [
        jh.Sampling(max_tokens=6, temperature=1.0, seed=2),
        jh.Sampling(max_tokens=19, temperature=0.7, top_k=4, seed=11),
        SAMPLED,
        jh.Sampling(max_tokens=3),
    ]
    sequences = [engine.prefill(PROMPTS[i]) for i in (1, 2, 0, 3)]
    assert len(set(alone)) > 5
    assert engine.generate(sequences, options)[2].tokens == alone


def test_a_seeded_response_does_not_depend_on_dispatch_size(tiny_model: jh.Model, alone: tuple[int, ...]) -> None:
    engine = jh.Engine(tiny_model, dataclasses.replace(CONFIG, steps_per_dispatch=7))
    assert engine.generate([engine.prefill(PROMPTS[0])], SAMPLED)[0].tokens == alone


def test_a_seeded_response_goes_on_after_preemption(tiny_model: jh.Model, alone: tuple[int, ...]) -> None:
    """Pages for one response only: the later request is set aside in the middle of its own, and comes back."""
    config = dataclasses.replace(CONFIG, max_tokens=64, max_context=56, max_checkpoints=1)
    engine = jh.Engine(tiny_model, config)
    first = engine.submit(PROMPTS[1], sampling=jh.Sampling(max_tokens=30, temperature=1.0, seed=3))
    second = engine.submit(PROMPTS[0], sampling=SAMPLED)
    left = {first, second}
    while left:
        for job in engine.step():
            assert job.error is None
            left.remove(job)
            job.sequence.release()
    assert engine.stats().events.preemptions > 0
    assert second.generation.tokens == alone


@pytest.mark.parametrize(
    "option",
    [
        jh.Sampling(max_tokens=11, repetition_penalty=3.0),
        jh.Sampling(max_tokens=11, presence_penalty=0.4, frequency_penalty=0.3),
    ],
    ids=["repetition", "presence and frequency"],
)
def test_penalties_count_the_prompt_and_what_earlier_dispatches_made(tiny_model: jh.Model, option: jh.Sampling) -> None:
    """Token by token against the definition, over three dispatches; half of all tokens are in the prompt."""
    engine = jh.Engine(tiny_model, CONFIG)
    prompt = RNG.permutation(np.arange(1, 61, 2)).tolist()
    tokens = engine.generate([engine.prefill(prompt)], option)[0].tokens
    reference = engine.prefill(prompt)
    made = np.zeros(61, np.int64)
    for token in tokens:
        seen = np.bincount(reference.tokens, minlength=61)
        assert penalised(reference.logits(), seen, made, option).argmax() == token
        made[token] += 1
        engine.extend(reference, [token])

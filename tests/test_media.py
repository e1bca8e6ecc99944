"""Images and video: what stands for them in a prompt, the tower's output, and sequences with them in the engine."""

import copy
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import jaxhybrid as jh
from jaxhybrid.engine.media_memory import MediaMemory
from jaxhybrid.errors import ConfigError, TokenError
from jaxhybrid.layers.vision import frame_inputs
from jaxhybrid.media import Span, expand_placeholders, place, rope_positions

GOLDENS = Path(__file__).parent / "goldens"
TOLERANCE = 2e-4  # of the standard deviation
GREEDY = jh.Sampling(max_tokens=24)
CONFIG = jh.EngineConfig(
    max_sequences=4, max_tokens=1024, page_size=16, prefill_chunks=(23,), prefill_rows=2, row_buckets=(4,),
    steps_per_dispatch=8,
)  # fmt: skip


def arrays_of(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDENS / name / "golden.npz") as arrays:
        return {key.removeprefix("vl_"): value for key, value in arrays.items() if key.startswith("vl_")}


def items(arrays: dict[str, np.ndarray]) -> list[jh.Media]:
    """Two images, and a video of two stills where the model takes video, in the order of the file."""
    grids = [tuple(map(int, grid)) for grid in arrays["grids"]]
    cuts = np.cumsum([np.prod(grid) for grid in grids])[:-1]
    return [jh.Media(patches, grid) for patches, grid in zip(np.split(arrays["patches"], cuts), grids, strict=True)]


def in_order(arrays: dict[str, np.ndarray]) -> list[jh.Media]:
    """As they stand in the prompt: the video between the images."""
    first, second, *video = items(arrays)
    return [first, *video, second]


def close(actual: np.ndarray, expected: np.ndarray, deviation: float) -> None:
    assert np.abs(np.asarray(actual) - expected).max() <= TOLERANCE * deviation


@cache
def engine_of(name: str) -> jh.Engine:
    """One for all tests: its programs are compiled once."""
    return jh.Engine(jh.load_model(GOLDENS / name), CONFIG)


@pytest.fixture(params=["qwen3_5_vl"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


every_golden = pytest.mark.parametrize(
    "name", ["qwen3_5_vl", "qwen3_5_moe_vl", "kimi_k3_a", "kimi_k3_b"], indirect=True
)


@pytest.fixture
def golden(name: str) -> dict[str, np.ndarray]:
    return arrays_of(name)


@pytest.fixture
def model(name: str) -> jh.Model:
    return engine_of(name).model


@pytest.fixture
def engine(name: str):
    engine = engine_of(name)
    yield engine
    engine.delete(tenant="default")
    assert engine.stats().live_slots == engine.stats().live_pages == 0


# Positions and placeholders


def test_positions_equal_the_reference(golden: dict[str, np.ndarray], model: jh.Model) -> None:
    ids = golden["input_ids"]
    spans = [placed.span for placed in place(ids, in_order(golden), model.config.vision)]
    positions, following = rope_positions(ids.size, spans)
    assert np.array_equal(positions, golden["position_ids"])
    assert following - ids.size == golden["rope_delta"] < 0
    for cut in (spans[0].start, spans[0].start + 4, spans[1].start + 1):  # what follows never changes what was
        assert np.array_equal(rope_positions(cut, [span for span in spans if span.start < cut])[0], positions[:, :cut])


def test_a_wide_still_pushes_text_on_by_its_width() -> None:
    positions, following = rope_positions(10, [Span(2, 2, 3)])
    assert positions.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]
    assert following == 7
    assert rope_positions(3, [])[1] == 3


def test_placeholders_that_do_not_fit_are_named(golden: dict[str, np.ndarray], model: jh.Model) -> None:
    ids, media, vision = golden["input_ids"], in_order(golden), model.config.vision
    with pytest.raises(TokenError, match="token 21 is a placeholder, and all 0 images and frames that came"):
        place(ids, [], vision)
    with pytest.raises(TokenError, match="1 images or frames have no placeholder"):
        place(ids, [*media, media[0]], vision)
    with pytest.raises(TokenError, match=r"expected 6 placeholders from token 21 on for an image of 4 x 6 .* got 5"):
        place(np.delete(ids, 22), media, vision)
    with pytest.raises(TokenError, match="expected patches of 54 values and sides that divide by 2, got 3 x 8"):
        place(ids, [jh.Media(media[0].patches, (1, 3, 8)), *media[1:]], vision)
    with pytest.raises(TokenError, match="expected 1 x 5 x 5 patches, got an array of"):
        jh.Media(media[0].patches, (1, 5, 5))
    with pytest.raises(TokenError, match="text alone, got 1 images or videos"):
        place(ids, media[:1], None)


def test_one_placeholder_a_still_is_expanded(golden: dict[str, np.ndarray], model: jh.Model) -> None:
    ids, vision = golden["input_ids"].tolist(), model.config.vision
    assert vision is not None
    marks = vision.placeholder_ids
    short = [token for at, token in enumerate(ids) if token not in marks or ids[at - 1] != token]
    assert len(short) < len(ids)
    assert expand_placeholders(short, in_order(golden), vision) == ids
    with pytest.raises(TokenError, match="a placeholder for each of 1 images and frames, got 4"):
        expand_placeholders(short, items(golden)[:1], vision)


# The tower


@pytest.mark.golden
@every_golden
def test_embeddings_and_logits_of_images_equal_the_reference(golden: dict[str, np.ndarray], model: jh.Model) -> None:
    made = [np.asarray(model.embed_frame(frame)) for item in items(golden) for frame in item.frames]
    close(np.concatenate(made), golden["embeddings"], golden["embeddings"].std())
    close(jh.forward(model, golden["input_ids"], in_order(golden)), golden["logits"], golden["logits"].std())


@pytest.mark.parametrize("name", ["qwen3_5_vl", "kimi_k3_a"], indirect=True)
def test_every_tensor_of_the_tower_is_felt(golden: dict[str, np.ndarray], model: jh.Model) -> None:
    frame, vision = items(golden)[0].frames[0], model.config.vision
    assert vision is not None
    inputs = frame_inputs(frame.patches, frame.height, frame.width, vision)
    flat = dict(nnx.to_flat_state(model.parameters))
    visual = [path for path in flat if path[0] == "visual"]
    run = jax.jit(lambda changed: nnx.merge(model.graph, nnx.from_flat_state({**flat, **changed})).visual(inputs))
    before = np.asarray(run({path: flat[path] for path in visual}))
    rng = np.random.default_rng(0)
    for path in visual:
        leaf = np.array(flat[path][...])
        for layer in range(vision.depth) if path[1] == "blocks" else [...]:
            changed = leaf.copy()
            changed[layer] += 0.3 * rng.normal(size=changed[layer].shape).astype(leaf.dtype)
            after = run({each: flat[each].replace(changed) if each == path else flat[each] for each in visual})
            assert np.abs(np.asarray(after) - before)[:6].max() > 1e-6, f"{path} {layer}"


# The engine


@pytest.mark.golden
@every_golden
def test_decode_after_images_equals_the_reference(engine: jh.Engine, golden: dict[str, np.ndarray]) -> None:
    """Chunks of 23 tokens end within an image; recorded tokens go through the decode loop."""
    placeholders = np.flatnonzero(golden["input_ids"] < 2)
    assert any(set(range(end - 1, end + 1)) <= set(placeholders) for end in (23, 69))
    sequence = engine.prefill(golden["input_ids"], media=in_order(golden))
    assert np.array_equal(sequence.tokens, golden["input_ids"])
    close(sequence.logits(), golden["logits"][-1], golden["logits"].std())
    made = engine.generate([sequence], GREEDY, forced=[golden["greedy"]])[0]
    expected = golden["decode"] - golden["decode"].max(-1, keepdims=True)
    expected = expected - np.log(np.exp(expected).sum(-1, keepdims=True))
    chosen = np.take_along_axis(expected, golden["greedy"][:, None], -1)[:, 0]
    close(np.array(made.log_probs), chosen, golden["logits"].std())


@pytest.mark.golden
@every_golden
def test_greedy_tokens_after_images_by_every_route(engine: jh.Engine, golden: dict[str, np.ndarray]) -> None:
    """Cold, forked, resumed, from a prefix hit, extended image by image."""
    ids, media, expected = golden["input_ids"], in_order(golden), tuple(golden["greedy"].tolist())
    cold = engine.prefill(ids, media=media)
    mark, child = cold.checkpoint(pin=True), cold.fork()
    assert [made.tokens for made in engine.generate([cold, child], GREEDY)] == [expected, expected]
    cold.release()
    child.release()
    hit = engine.prefill(ids, media=in_order(golden))  # other arrays of the same content
    assert (hit.reuse.matched, hit.reuse.resumed) == (ids.size, ids.size)
    resumed = engine.resume(mark)
    assert np.array_equal(resumed.tokens, ids)
    assert [made.tokens for made in engine.generate([hit, resumed], GREEDY)] == [expected, expected]
    hit.release()
    resumed.release()
    mark.release()
    engine.delete(tenant="default")
    first_end = 21 + 6 + 1
    grown = engine.prefill(ids[:first_end], media=media[:1])
    engine.extend(grown, ids[first_end:], media=media[1:])
    assert engine.generate([grown], GREEDY)[0].tokens == expected


def test_other_images_are_another_prefix(engine: jh.Engine, golden: dict[str, np.ndarray]) -> None:
    """The same text with another image shares what stands before the image, and nothing after."""
    ids, (first, video, second) = golden["input_ids"], in_order(golden)
    start = int(np.flatnonzero(ids == 0)[0])
    seen = engine.prefill(ids, media=[first, video, second], message_start=15)
    other = jh.Media(first.patches + np.float32(1e-3), first.grid)
    changed = engine.prefill(ids, media=[other, video, second])
    assert (changed.reuse.matched, changed.reuse.resumed) == (start, 15)
    assert np.abs(changed.logits() - seen.logits()).max() > 1e-6
    turned = jh.Media(first.patches, (1, 6, 4))  # the same bytes on another grid
    assert engine.prefill(ids, media=[turned, video, second]).reuse.matched == start
    last = jh.Media(second.patches[::-1], second.grid)
    late = engine.prefill(ids, media=[first, video, last])
    assert late.reuse.matched == int(np.flatnonzero(ids == 0)[6])
    assert engine.prefill(ids, media=[first, video, second]).reuse.matched == ids.size


def test_a_checkpoint_within_an_image_is_resumed(model: jh.Model, golden: dict[str, np.ndarray]) -> None:
    ids, media = golden["input_ids"], in_order(golden)
    config = jh.EngineConfig(
        max_sequences=2, max_tokens=512, page_size=16, prefill_chunks=(23,), steps_per_dispatch=8, row_buckets=(2,),
        retention=jh.Retention(prompt_end=False, response_end=False, junctions=False),
    )  # fmt: skip
    engine = jh.Engine(model, config)
    inside = int(np.flatnonzero(ids == 0)[0]) + 4
    engine.prefill(ids, media=media, turn_start=inside).release()
    again = engine.prefill(ids, media=media)
    assert again.reuse.resumed == inside
    close(again.logits(), golden["logits"][-1], golden["logits"].std())


def test_a_preempted_prompt_with_images_is_computed_anew(engine: jh.Engine, golden: dict[str, np.ndarray]) -> None:
    """Even where nothing of it was kept, and where its images came with earlier calls."""
    ids, media, expected = golden["input_ids"], in_order(golden), tuple(golden["greedy"].tolist())
    first_end = 21 + 6 + 1
    sequence = engine.prefill(ids[:first_end], media=media[:1])
    engine.extend(sequence, ids[first_end:], media=media[1:])
    fresh = engine.submit(ids, media=media, sampling=GREEDY)
    engine.step()
    engine.step()
    engine._preempt(fresh)
    memory = engine._memory
    memory.media._embedded.clear()
    for checkpoint in list(memory.index):
        memory.pool.release(memory.index.remove(checkpoint))
    while fresh.phase != "done":
        engine.step()
    assert fresh.error is None
    assert fresh.generation.tokens == expected
    assert engine.generate([sequence], GREEDY)[0].tokens == expected


def test_an_image_is_embedded_once_for_prompts_that_share_it(
    engine: jh.Engine, golden: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    embed = jh.Model.embed_frame
    monkeypatch.setattr(
        jh.Model, "embed_frame", lambda model, frame: (calls.append(frame.content_hash), embed(model, frame))[1]
    )
    ids, media = golden["input_ids"], in_order(golden)
    fresh = [jh.Media(item.patches * np.float32(1.5), item.grid) for item in media]
    engine.prefill(ids, media=fresh)
    engine.prefill(np.concatenate([[7], ids]), media=fresh)
    assert len(calls) == len(set(calls)) == 4  # two images, two stills of a video


def test_stills_with_the_same_hash_bits_keep_apart(model: jh.Model, golden: dict[str, np.ndarray]) -> None:
    ids, media = golden["input_ids"], in_order(golden)
    memory = MediaMemory(model)
    keys, frames = memory.keyed(ids, media)
    assert len(frames) == 4
    assert np.array_equal(memory.token_ids(keys), ids)
    assert np.array_equal(keys == ids, (ids != 0) & (ids != 1))
    assert memory.offset(keys) == golden["rope_delta"]
    # Text that goes on within an image, as a fork may: it follows the image's part as it would the whole.
    forked = np.concatenate([keys[:23], np.int32([7, 8])])
    assert memory.spans(forked) == [Span(21, 2, 3, cut=2)]
    assert memory.offset(forked) == 21 + 3 + 2 - forked.size
    crowded = MediaMemory(model)
    stills = dict(memory._stills)
    (key, *_), (*_, last) = stills, stills.values()
    crowded._stills[key] = last  # as if another still had come first with the same bits
    other, _ = crowded.keyed(ids, media)
    assert crowded._stills[int(other[ids == 0][0])] == stills[key]
    assert int(other[ids == 0][0]) != key


def test_a_model_without_vision_takes_no_media(golden: dict[str, np.ndarray]) -> None:
    model = jh.load_model(GOLDENS / "qwen3_a")
    with pytest.raises(TokenError, match="the model has no vision"):
        jh.forward(model, [3, 4], items(golden)[:1])
    with pytest.raises(ConfigError, match="takes text alone"):
        model.patch_rule  # noqa: B018


@pytest.mark.parametrize("name", ["kimi_k3_a"], indirect=True)
def test_a_model_of_images_takes_no_video(golden: dict[str, np.ndarray], model: jh.Model) -> None:
    first, vision = items(golden)[0], model.config.vision
    video = jh.Media(np.concatenate([first.patches, first.patches]), (2, *first.grid[1:]))
    for call in (place, expand_placeholders):
        with pytest.raises(TokenError, match="expected images, got a video of 2 stills: the model takes no video"):
            call(np.zeros(12, np.int32), [video], vision)


@pytest.mark.parametrize("name", ["kimi_k3_b"], indirect=True)
def test_no_placeholder_is_chosen_forced_or_scored(engine: jh.Engine, golden: dict[str, np.ndarray]) -> None:
    """Even where it is the likeliest: the head's row of the placeholder is put above all others."""
    ids, media = golden["input_ids"], in_order(golden)
    sequence = engine.prefill(ids, media=media)
    for call in (lambda: engine.generate([sequence], GREEDY, forced=[[7, 0]]), lambda: engine.score(sequence, [7, 0])):
        with pytest.raises(TokenError, match="token 1 is a placeholder"):
            call()
    model = engine.model
    flat = dict(nnx.to_flat_state(model.parameters))
    path = ("lm_head", "weight")
    head = np.array(flat[path][...])
    head[0] = 5 * head[int(golden["greedy"][0])]
    changed = copy.copy(model)
    changed.parameters = nnx.from_flat_state({**flat, path: flat[path].replace(head)})
    seeing = jh.Engine(changed, CONFIG)
    again = seeing.prefill(ids, media=media)
    assert again.logits().argmax() == 0
    sampled = jh.Sampling(max_tokens=24, temperature=1.0, seed=3)
    for options in (GREEDY, sampled):
        made = seeing.generate([again.fork()], options)[0]
        assert 0 not in made.tokens
        assert max(made.log_probs[:1]) < -0.5  # of the model's own distribution, which has the placeholder in it


@pytest.mark.parametrize(
    "patches", [np.full((4, 6), np.nan), np.full((4, 6), np.inf, np.float32), np.zeros((4, 6), int)]
)
def test_patches_that_are_no_numbers_are_refused(patches: np.ndarray) -> None:
    with pytest.raises(TokenError, match="expected patches of finite numbers"):
        jh.Media(patches, (1, 2, 2))


def test_media_come_as_a_list(golden: dict[str, np.ndarray], model: jh.Model) -> None:
    for media in (items(golden)[0], [None], (item for item in items(golden))):
        with pytest.raises(TokenError, match="expected media as a list of Media, got"):
            place(golden["input_ids"], media, model.config.vision)


@pytest.mark.parametrize("grid", [[(1, 2, 2)], (2, 2), (1, 2, 0), (1.0, 2.0, 2.0)])
def test_a_grid_that_is_none_is_refused(grid) -> None:
    with pytest.raises(TokenError, match=r"expected a grid of \(time, height, width\) in patches, got"):
        jh.Media(np.zeros((4, 6), np.float32), grid)

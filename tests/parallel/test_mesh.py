"""A model on a mesh gives one device's logits and tokens, and moves neither weights nor state between devices."""

import functools
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from mesh_models import MODELS

import jaxhybrid as jh
from jaxhybrid.errors import ConfigError
from jaxhybrid.layers.context import Execution
from jaxhybrid.layers.norm import rms_norm, rms_norm_by_group
from jaxhybrid.models.random_folder import write_random_folder
from jaxhybrid.parallel.mesh import MESH_AXES, make_mesh, partition_of
from jaxhybrid.parallel.sharding import leaf_sharding
from pallas_kernels import registry
from pallas_kernels.grouped_matmul import ExpertBiases, ragged, reference, xla
from pallas_kernels.grouped_matmul.mesh import split_experts
from pallas_kernels.partition import partitioned

pytestmark = pytest.mark.mesh

GOLDENS = Path(__file__).parents[1] / "goldens"
TOLERANCE = 2e-4  # of the logits' standard deviation
SCANNED = {"gpt_oss_a", "nemotron_h_latent", "qwen3_5_text"}  # laid out as accelerators want it
MESHES = {"8x1": (8, 1), "2x4": (2, 4), "4x2": (4, 2)}  # data x model
CONFIG = jh.EngineConfig(
    max_sequences=8, max_tokens=1024, max_checkpoints=8, page_size=8, prefill_chunks=(24,), prefill_rows=8,
    row_buckets=(8,), steps_per_dispatch=12, retention=jh.Retention(),
)  # fmt: skip
GREEDY = jh.Sampling(max_tokens=24)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    parent = tmp_path_factory.mktemp("mesh")
    return {name: write_random_folder(parent / name, config) for name, config in MODELS.items()}


@functools.cache
def prompts(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(0, vocab_size, length).tolist() for length in (50, 31, 7)]


def run(engine: jh.Engine) -> tuple[list[np.ndarray], list[tuple[int, ...]]]:
    """Logits after every prompt, and 24 greedy tokens of each, of a fork and of a resumed checkpoint, in batches."""
    jobs = [engine.submit(ids) for ids in prompts(engine.model.config.vocab_size)]
    while any(job.phase != "done" for job in jobs):
        engine.step()
    sequences = [job.sequence for job in jobs]
    logits = [np.asarray(sequence.logits()) for sequence in sequences]
    mark = sequences[0].checkpoint()
    made = engine.generate([*sequences, sequences[1].fork()], GREEDY)
    made += engine.generate([engine.resume(mark)], GREEDY)
    return logits, [generation.tokens for generation in made]


@pytest.fixture(scope="session")
def expected(folders: dict[str, Path]):
    @functools.cache
    def of(name: str):
        return run(jh.Engine(jh.load_model(folders[name]), CONFIG))

    return of


def check(engine: jh.Engine, expected: tuple[list[np.ndarray], list[tuple[int, ...]]]) -> None:
    logits, tokens = run(engine)
    for actual, wanted in zip(logits, expected[0], strict=True):
        assert np.abs(actual - wanted).max() <= TOLERANCE * wanted.std()
    assert tokens == expected[1]


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_tokens_are_one_devices(name: str, mesh: str, folders, expected) -> None:
    engine = jh.Engine(jh.load_model(folders[name], mesh=make_mesh(*MESHES[mesh])), CONFIG)
    check(engine, expected(name))
    check_what_moves(engine)


def check_what_moves(engine: jh.Engine) -> None:
    """Between devices only rows of activations or of logits do; any array of weights or state is larger."""
    widest = max(engine.model.config.vocab_size, 80)
    for program, shapes in collectives(engine).items():
        steps = CONFIG.prefill_chunks[-1] if program == "prefill" else 1
        large = [(operation, shape) for operation, shape in shapes if math.prod(shape) > 8 * steps * 3 * widest]
        assert (program, large) == (program, [])
    moved = {name for name, shapes in collectives(engine).items() if shapes}
    assert moved == {"prefill", "decode"}


def collectives(engine: jh.Engine) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """Result shapes of whatever a compiled program moves between devices."""
    found: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    operations = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    for key, program in engine._programs._compiled.items():
        for line in program.as_text().splitlines():
            match = re.search(rf"= (.*?) ({operations})(?:-start)?\(", line)
            if match:
                shapes = re.findall(r"\w+\[([\d,]*)\]", match[1])
                found.setdefault(key[0], []).extend(
                    (match[2], tuple(int(size) for size in shape.split(",") if size)) for shape in shapes
                )
    return found


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("deepseek_v2_lite", {"data": 2, "model": 2}),
        ("deepseek_v32_b", {"model": 2}),
        ("deepseek_v4_mtp", {"model": 3}),
        ("falcon_h1_a", {"model": 2}),
        ("gpt_oss_a", {"data": 2, "model": 2}),
        ("jamba_a", {"data": 2, "model": 2}),
        ("kimi_k3_b", {"data": 2, "model": 2}),
        ("nemotron_h_latent", {"data": 2, "model": 2}),
        ("qwen3_5_text", {"model": 2}),
    ],
)
def test_a_goldens_logits_on_a_mesh(name: str, sizes: dict[str, int]) -> None:
    """One prompt: its rows can't be shared out, but its tokens go to the experts of both halves of a mesh."""
    with np.load(GOLDENS / name / "golden.npz") as arrays:
        ids, wanted, deviation = arrays["input_ids"][1, :40], arrays["logits"][1, :40], arrays["logits"].std()
    scanned = Execution(scan_layers=True, stack_experts=True) if name in SCANNED else None
    actual = jh.forward(jh.load_model(GOLDENS / name, mesh=make_mesh(**sizes), execution=scanned), ids)
    assert np.abs(np.asarray(actual) - wanted).max() <= TOLERANCE * deviation


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 1, 8)])
def test_experts_are_split(sizes: tuple[int, int, int], folders, expected) -> None:
    """Data, model and expert parallelism together, and experts alone, on a mesh whose axes are explicit."""
    data, model, expert = sizes
    mesh = jax.make_mesh((data, expert, model), ("data", "expert", "model"))
    engine = jh.Engine(jh.load_model(folders["kimi_linear"], mesh=mesh), CONFIG)
    check(engine, expected("kimi_linear"))
    check_what_moves(engine)
    up = engine.model.parameters["segments"][1]["layers"][0]["ffn"]["up_proj"]["weight"][...]
    assert up.shape == (8, 16, 40)
    assert up.addressable_shards[0].data.shape == (8 // expert, 16 // model, 40)
    # Kimi Delta Attention's 4 heads don't divide by 8 devices: every one of them has them all.
    assert engine.model.partition.size("heads") == (4 if expert == 2 else 1)


def test_heads_and_widths_are_split_over_experts_too_where_they_divide(folders) -> None:
    """Heads and 72 channels are split over 4 devices; of 3 x 2 devices they are over 2, beside experts over 3."""
    mesh = make_mesh(expert=2, model=2)
    partition = jh.load_model(folders["qwen3_next"], mesh=mesh).partition
    assert {name: partition.size(name) for name in MESH_AXES} == {
        "rows": 1, "heads": 4, "kv_heads": 4, "mlp": 4, "vocab": 2, "experts": 2, "expert_mlp": 2,
    }  # fmt: skip
    odd = jh.load_model(folders["qwen3_next"], mesh=make_mesh(expert=3, model=2)).partition
    assert [odd.size(name) for name in ("heads", "mlp", "experts")] == [2, 2, 3]


def test_weights_and_state_are_split_where_they_lie(folders) -> None:
    model = jh.load_model(folders["qwen3_next"], mesh=make_mesh(data=2, model=4))
    shares = {}
    for path, variable in nnx.to_flat_state(model.parameters):
        leaf = variable[...]
        name = path[-2] if path[-1] == "weight" else path[-1]
        shares[name] = leaf.size // leaf.addressable_shards[0].data.size
    assert set(shares.values()) == {1, 4}
    whole = {name for name, share in shares.items() if share == 1}
    # Norms, routers and gates, which belong to no head; two key/value heads of four shards; 102 ids.
    assert whole == {
        "embed_tokens", "norm", "mixer_norm", "ffn_norm", "q_norm", "k_norm", "router", "shared_expert_gate",
        "k_proj", "v_proj",
    }  # fmt: skip
    state = {f"{leaf.group}.{leaf.name}": leaf for leaf in model.layout.leaves}
    assert state["attention.k"].shape == (4 * 16,)  # two heads, twice
    partition = partition_of(make_mesh(data=2, model=4))
    for name, axis in (("attention.k", 3), ("gated_delta_net.recurrent", 2), ("gated_delta_net.conv", 3)):
        assert leaf_sharding(state[name], partition).spec[axis] == "model", name


def test_an_orbax_folder_of_one_mesh_loads_on_another(folders, tmp_path: Path, expected) -> None:
    saved = jh.load_model(folders["qwen3"], mesh=make_mesh(model=4))
    saved.save(tmp_path / "saved")
    for mesh in (None, make_mesh(data=2, model=2)):
        loaded = jh.load_model(tmp_path / "saved", mesh=mesh)
        for before, after in zip(jax.tree.leaves(saved.parameters), jax.tree.leaves(loaded.parameters), strict=True):
            np.testing.assert_array_equal(before, after)
            assert after.sharding.device_set == set(jax.devices()[: 1 if mesh is None else 4])


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("qwen3_next_a", {"model": 2}, r"layer 3: 3 key/value heads of its attention .* to 2 devices .* axis 'model'"),
        ("kimi_linear_a", {"model": 2}, r"layer 3: 3 attention heads of its latent_attention .* to 2 devices"),
        ("kimi_linear_b", {"model": 2}, r"layer 0: 3 heads of its kimi_delta .* to 2 devices"),
        ("deepseek_v4_mtp", {"model": 2}, r"layer 0: 3 groups of heads of its compressed_attention .* to 2 devices"),
        ("kimi_linear_a", {"expert": 4}, r"layer 1: 6 experts of its moe .* to 4 devices .* axis 'expert'"),
        ("nemotron_h_moe", {"model": 4}, r"layer 1: 26 channels of the experts' inner width of its moe .* to 4"),
    ],
)
def test_what_does_not_divide_is_named(name: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        jh.load_model(GOLDENS / name, mesh=make_mesh(**sizes))


def test_a_mesh_that_means_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs 16 devices, found 8"):
        make_mesh(data=4, model=4)
    with pytest.raises(ConfigError, match="axes among data, expert, model, got tensor"):
        jh.load_model(GOLDENS / "qwen3_b", mesh=jax.make_mesh((2,), ("tensor",)))
    with pytest.raises(ConfigError, match="needs stack_experts=True"):
        jh.load_model(GOLDENS / "kimi_linear_a", mesh=make_mesh(expert=2), execution=Execution(False, False))


@pytest.mark.parametrize("implementation", [ragged, xla])
@pytest.mark.parametrize(("biased", "layers"), [(False, ()), (True, ()), (True, (2,))])
def test_experts_of_several_devices_sum_up(implementation, biased: bool, layers: tuple[int, ...]) -> None:
    """Each brings its experts and its part of the inner width, of a stack of layers too; the last bias counts once."""
    rng = np.random.default_rng(5)
    tokens, experts, inner, width, chosen = 12, 6, 10, 7, 3
    x, gate, up, down = (
        rng.normal(size=shape).astype(np.float32)
        for shape in (
            (tokens, width),
            *((*layers, experts, *matrix) for matrix in ((inner, width), (inner, width), (width, inner))),
        )
    )
    ids = np.argsort(rng.random((tokens, experts)))[:, :chosen].astype(np.int32)
    weights = rng.random((tokens, chosen)).astype(np.float32)
    valid = np.arange(tokens) != 4
    shapes = ((experts, inner), (experts, inner), (experts, width))
    biases = ExpertBiases(*(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)) if biased else None
    layer = jnp.int32(1) if layers else None
    options = {"activation": lambda gate, up: jax.nn.silu(gate) * up, "biases": biases, "layer": layer}
    arguments = (x, ids, weights, gate, up, down, valid)
    with partitioned(partition_of(make_mesh(data=2, model=2, expert=2))):
        actual = jax.jit(lambda: split_experts(implementation.routed_experts, *arguments, **options))()
    np.testing.assert_allclose(actual, reference.routed_experts(*arguments, **options), atol=2e-5)


@pytest.mark.parametrize("groups", [8, 6])  # 6 don't divide by the mesh's 4: every device has all of them
def test_norms_of_groups_on_a_mesh(groups):
    rng = np.random.default_rng(5)
    x, weight = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 5, groups, 32), (groups, 32)))
    with registry.target("tpu"), partitioned(partition_of(make_mesh(data=2, model=4))):
        actual = jax.jit(lambda: rms_norm_by_group(x, weight, 1e-6))()
    np.testing.assert_allclose(actual, rms_norm(x, weight, 1e-6).reshape(3, 5, -1), atol=1e-5)

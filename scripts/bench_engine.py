"""Speed of the engine on this machine, as ratios within one run, each beside a parity figure.

(a) prefill of 2,048 tokens and decode at batch 1 and 8 against `transformers` on the same float32 checkpoint;
(b) decode at batch 1 against one jitted matrix-vector product over the same bytes;
(c) a prefix hit against a cold prefill, at growing lengths;
(d) branches off a warm prefix.

python scripts/bench_engine.py --reference_python=python   # an interpreter that has the extra `oracle`
"""

import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from jaxhybrid.command_line import run

if TYPE_CHECKING:
    import jaxhybrid as jh

MODELS = flags.DEFINE_list("models", ["qwen3_next", "kimi_linear"], "Names of files in configs/bench.")
SECTIONS = flags.DEFINE_list("sections", ["a", "b", "c", "d"], "Which parts to run.")
REFERENCE = flags.DEFINE_string("reference_python", None, "Interpreter with transformers; none skips the comparison.")
PROMPT = flags.DEFINE_integer("prompt", 2048, "Prompt tokens of (a), (b) and (d).")
STEPS = flags.DEFINE_integer("steps", 32, "Decode steps of (a) and (b).")
LENGTHS = flags.DEFINE_list("lengths", ["1024", "4096", "16384"], "Prefix lengths of (c).")
BRANCHES = flags.DEFINE_integer("branches", 8, "Branches of (d).")
BRANCH_TOKENS = flags.DEFINE_integer("branch_tokens", 64, "New tokens of each branch of (d).")
REPEATS = flags.DEFINE_integer("repeats", 3, "Timed runs after one untimed; the median counts.")
DEVICES = flags.DEFINE_integer("devices", 1, "CPU devices that the model is split over; XLA gives each a core.")
OUT = flags.DEFINE_string("out", None, "Also write the figures to this JSON file.")
flags.register_validator(SECTIONS, lambda sections: set(sections) <= set("abcd"), "expected some of a, b, c, d")
flags.register_validator(LENGTHS, lambda lengths: all(map(str.isdecimal, lengths)), "expected numbers of tokens")

CONFIGS = Path(__file__).resolve().parents[1] / "configs" / "bench"


def main(_: list[str]) -> None:
    if DEVICES.value > 1:  # before jax starts
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES.value}"
    figures = {}
    for name in MODELS.value:
        with tempfile.TemporaryDirectory() as folder:
            figures[name] = bench(name, Path(folder) / name)
    if OUT.value:
        Path(OUT.value).write_text(json.dumps(figures, indent=1))


def bench(name: str, folder: Path) -> dict[str, Any]:
    import jaxhybrid as jh
    from jaxhybrid.models.random_folder import write_random_folder

    write_random_folder(folder, json.loads((CONFIGS / f"{name}.json").read_text()))
    model = jh.load_model(folder, mesh=jh.make_mesh(model=DEVICES.value))
    longest = max(int(length) for length in LENGTHS.value) + 64
    config = jh.EngineConfig(
        max_sequences=max(8, BRANCHES.value + 1), max_tokens=8 * (PROMPT.value + 256) + 2 * longest,
        max_context=longest, max_checkpoints=8, prefill_chunks=(16, 64, 512), retention=jh.Retention(),
    )  # fmt: skip
    engine = jh.Engine(model, config)
    print(f"\n{name}: {model.parameter_count / 1e6:.1f} M parameters, float32")
    run: dict[str, Callable[[jh.Engine, Path], dict[str, Any]]] = {
        "a": against_reference, "b": against_stream, "c": hits, "d": branches,
    }  # fmt: skip
    return {section: run[section](engine, folder) for section in SECTIONS.value}


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    """The prompts the reference is given too."""
    import numpy as np

    return np.random.default_rng(seed).integers(3, 8192, (count, length)).tolist()


def timed(action: Callable[[], Any], prepare: Callable[[], Any] = lambda: None) -> float:
    """Median seconds of `action`, each run after `prepare`, once untimed."""
    seconds = []
    for repeat in range(REPEATS.value + 1):
        prepare()
        started = time.perf_counter()
        action()
        if repeat:
            seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def against_reference(engine: "jh.Engine", folder: Path) -> dict[str, Any]:
    """Tokens/s of prefill and decode, at each batch size with the same steps and context; ratios to transformers."""
    ours = {batch: ours_at(engine, batch) for batch in (1, 8)}
    theirs = reference(folder) if REFERENCE.value else {}
    figures: dict[str, Any] = {}
    for batch, (prefill_s, decode_s, tokens) in ours.items():
        row: dict[str, Any] = {
            "prefill_tokens_per_s": batch * PROMPT.value / prefill_s,
            "decode_tokens_per_s": batch * STEPS.value / decode_s,
        }
        other = theirs.get(str(batch))
        if other:
            same = sum(a == b for a, b in zip(flat(tokens), flat(other["tokens"]), strict=True))
            row |= {
                "prefill_ratio": other["prefill_s"] / prefill_s,
                "decode_ratio": other["decode_s"] / decode_s,
                "reference_prefill_tokens_per_s": batch * PROMPT.value / other["prefill_s"],
                "reference_decode_tokens_per_s": batch * STEPS.value / other["decode_s"],
                "equal_greedy_tokens": f"{same} of {batch * STEPS.value}",
            }
        figures[f"batch {batch}"] = row
        print(f"(a) batch {batch}: " + shown(row), flush=True)
    return figures


def ours_at(engine: "jh.Engine", batch: int) -> tuple[float, float, list[list[int]]]:
    import jaxhybrid as jh

    tokens = prompts(batch, PROMPT.value)
    prefills, decodes, made = [], [], []
    for repeat in range(REPEATS.value + 1):
        engine.delete(tenant="default")
        started = time.perf_counter()
        sequences = [engine.prefill(ids) for ids in tokens]
        prefilled = time.perf_counter()
        generated = engine.generate(sequences, jh.Sampling(max_tokens=STEPS.value))
        if repeat:
            prefills.append(prefilled - started)
            decodes.append(time.perf_counter() - prefilled)
        made = [list(generation.tokens) for generation in generated]
        for sequence in sequences:
            sequence.release()
    return statistics.median(prefills), statistics.median(decodes), made


def reference(folder: Path) -> dict[str, Any]:
    assert REFERENCE.value is not None
    script = Path(__file__).with_name("bench_reference.py")
    command = [REFERENCE.value, str(script), f"--folder={folder}", f"--prompt={PROMPT.value}", f"--steps={STEPS.value}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        raise SystemExit(f"the reference failed:\n{done.stderr[-2000:]}")
    return json.loads(line.removeprefix("RESULT "))


def against_stream(engine: "jh.Engine", folder: Path) -> dict[str, Any]:
    """Decode at batch 1 against one matrix-vector product over the bytes a token must read: chosen experts only."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    import jaxhybrid as jh
    from jaxhybrid.config import MoeSpec

    read = 0
    spec = engine.model.config.layers[-1].ffn
    for path, leaf in nnx.to_flat_state(engine.model.parameters):
        routed = isinstance(spec, MoeSpec) and "experts" in path
        share = spec.num_experts_per_tok / spec.num_experts if isinstance(spec, MoeSpec) and routed else 1
        read += 0 if path[0] in ("embed_tokens", "mtp") else int(leaf.size * leaf.dtype.itemsize * share)
    weight = jnp.ones((read // 4 // 1024, 1024), jnp.float32)
    product = jax.jit(lambda w, x: jnp.einsum("ni,oi->no", x, w)).lower(weight, jnp.ones((1, 1024))).compile()
    row = jnp.ones((1, 1024))
    stream_s = timed(lambda: [jax.block_until_ready(product(weight, row)) for _ in range(10)]) / 10
    engine.delete(tenant="default")
    sequence = engine.prefill(prompts(1, PROMPT.value)[0])
    mark = sequence.checkpoint(pin=True)
    sequence.release()
    step_s = 0.0
    held: list[jh.Sequence] = []

    def resume() -> None:
        for old in held:
            old.release()
        held[:] = [engine.resume(mark)]

    step_s = timed(lambda: engine.generate(held, jh.Sampling(max_tokens=STEPS.value)), resume) / STEPS.value
    held[0].release()
    mark.release()
    row_out = {"megabytes_per_token": read / 1e6, "stream_ms": stream_s * 1e3, "step_ms": step_s * 1e3}
    row_out["share_of_stream"] = stream_s / step_s
    print("(b) " + shown(row_out), flush=True)
    return row_out


def hits(engine: "jh.Engine", folder: Path) -> dict[str, Any]:
    """A prompt prefilled from nothing, and again from its checkpoint plus 8 new tokens."""
    figures = {}
    for length in map(int, LENGTHS.value):
        tokens = prompts(1, length, seed=length)[0]
        cold_s = timed(partial(cold, engine, tokens), partial(engine.delete, tenant="default"))
        kept = engine.prefill(tokens)
        kept.release()
        added = iter(range(3, 1000))
        warm: list[jh.Sequence] = []

        def hit(t: list[int] = tokens, warm: list = warm, added: Any = added) -> None:
            warm[:] = [engine.prefill([*t, *[next(added)] * 8])]

        def let_go(warm: list = warm) -> None:
            for sequence in warm:
                sequence.release()
            warm.clear()

        hit_s = timed(hit, let_go)
        reuse = warm[0].reuse
        let_go()
        fresh = engine.prefill([*tokens, *[3] * 8], tenant="alone")
        again = engine.prefill([*tokens, *[3] * 8])
        worst = float(abs(fresh.logits() - again.logits()).max() / fresh.logits().std())
        fresh.release()
        again.release()
        for tenant in ("alone", "default"):
            engine.delete(tenant=tenant)
        row = {"cold_ms": cold_s * 1e3, "hit_ms": hit_s * 1e3, "ratio": cold_s / hit_s, "resumed": reuse.resumed}
        row |= {"gap": reuse.gap, "logits_differ_by_std": worst}
        figures[str(length)] = row
        print(f"(c) {length} tokens: " + shown(row), flush=True)
    return figures


def cold(engine: "jh.Engine", tokens: list[int]) -> None:
    engine.prefill(tokens).release()


def branches(engine: "jh.Engine", folder: Path) -> dict[str, Any]:
    """Branches off a warm prefix: time, prefix tokens computed again, bytes moved; equal to unbranched output."""
    import jaxhybrid as jh

    engine.delete(tenant="default")
    tokens = prompts(1, PROMPT.value, seed=9)[0]
    parent = engine.prefill(tokens)
    tails = prompts(BRANCHES.value, 4, seed=10)
    sampling = jh.Sampling(max_tokens=BRANCH_TOKENS.value)
    made: list[Any] = []

    def branch() -> None:
        children = [parent.fork() for _ in tails]
        for child, tail in zip(children, tails, strict=True):
            engine.extend(child, tail)
        made[:] = engine.generate(children, sampling)
        for child in children:
            child.release()

    before = engine.stats()
    seconds = timed(branch)
    after = engine.stats()
    alone = engine.prefill([*tokens, *tails[0]], tenant="alone")
    same = engine.generate([alone], sampling)[0].tokens == made[0].tokens
    alone.release()
    parent.release()
    row = {
        "seconds": seconds,
        "new_tokens_per_s": BRANCHES.value * BRANCH_TOKENS.value / seconds,
        "prefix_tokens_computed_again": after.tokens.gap - before.tokens.gap,
        "recurrent_bytes_copied": after.recurrent_bytes_copied - before.recurrent_bytes_copied,
        "kv_bytes_copied_per_branch": (after.kv_bytes_copied - before.kv_bytes_copied)
        / (BRANCHES.value * (REPEATS.value + 1)),
        "same_tokens_as_unbranched": same,
    }
    print("(d) " + shown(row), flush=True)
    return row


def flat(rows: list[list[int]]) -> list[int]:
    return [token for row in rows for token in row]


def shown(row: dict[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
    )


if __name__ == "__main__":
    run(main)

"""Counts a prefill of Gated DeltaNet layers by this project's kernels beside tpu-inference's fused one, compiled alike.

git clone https://github.com/vllm-project/tpu-inference CHECKOUT
python scripts/compare_gdn_kernel.py --checkout=CHECKOUT

Needs the extra `aot`; no TPU. Both take 2,048 tokens of one prompt of Qwen3-Next 80B: theirs the convolution, gates and
recurrence in one kernel (tpu_inference/kernels/gdn/v3), ours the convolution and the recurrence in one, gates made by
XLA before it; and in one kernel each. Nothing of theirs is part of this project.
"""

import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

from absl import app, flags

from jaxhybrid.command_line import run

CHECKOUT = flags.DEFINE_string("checkout", None, "A checkout of tpu-inference.", required=True)
PART = flags.DEFINE_string("part", "tpu-v6e", "TPU to compile for.")

MODEL, OPERATORS = "Qwen3-Next 80B", ("conv_gated_delta", "gated_delta", "short_conv")
KERNEL = Path("tpu_inference") / "kernels" / "gdn" / "v3" / "wrapper.py"
TILE = 64  # tokens that their kernel takes at a time, by default


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    checkout = Path(CHECKOUT.value)
    if not (checkout / KERNEL).is_file():
        raise app.UsageError(f"{checkout}: expected a checkout of tpu-inference, found no {KERNEL}")
    os.environ["JAX_PLATFORMS"] = "cpu"
    from pallas_kernels import aot, published, schedule_report

    part = aot.PARTS[PART.value]
    with tempfile.TemporaryDirectory() as folder:
        cases = [
            case
            for case in published.tpu_cases()
            if case.model == MODEL and case.form == "prefill" and case.operator in OPERATORS
        ]
        _, ours = schedule_report.rows(part.name, cases, Path(folder))
        theirs, spills, moved = their_counts(part, checkout, Path(folder))
    print("| kernel | bundles a token | spills a step | MB moved |\n| --- | --- | --- | --- |")
    for case, row in zip(cases, ours, strict=True):
        megabytes = float(row[11]) * case.fewest_bytes / 1e6
        print(f"| {row[0]} | {row[5]} | {row[10]} | {megabytes:,.1f} |")
    print(f"| tpu-inference, all in one | {theirs:,.0f} | {spills:,} | {moved / 1e6:,.1f} |")


def their_counts(part: Any, checkout: Path, folder: Path) -> tuple[float, int, int]:
    """Bundles a token, spills in a tile, and bytes that the whole call moves."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels import aot, published_models, tpu_schedule
    from pallas_kernels.published_case import PREFILL_TOKENS

    package = types.ModuleType("tpu_inference")  # without what the package itself imports: vLLM and more
    package.__path__ = [str(checkout / "tpu_inference")]
    sys.modules["tpu_inference"] = package
    from tpu_inference.kernels.gdn.v3 import wrapper

    model = published_models.DELTA_MODELS[MODEL]
    keys, values, dim, taps, tokens = model.key_heads, model.value_heads, model.dim, 4, PREFILL_TOKENS
    width = (2 * keys + values) * dim

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def call(qkv, b, a, conv, state, weight, a_log, dt_bias, starts, slots, kinds, lengths):
        return wrapper.fused_conv1d_gdn(
            qkv, b, a, conv, state, weight, None, a_log, dt_bias, starts, slots, kinds, lengths,
            n_kq=keys, n_v=values, d_k=dim, d_v=dim, kernel_size=taps, mixed_tile_size=TILE,
        )  # fmt: skip

    heads, rows = array(values, dtype=jnp.float32), array(1, dtype=jnp.int32)
    compiled = aot.compile_for(
        part, call, array(tokens, width), array(tokens, values), array(tokens, values), array(2, taps - 1, width),
        array(2, values, dim, dim, dtype=jnp.float32), array(width, 1, taps), heads, heads, array(2, dtype=jnp.int32),
        rows, array(3, dtype=jnp.int32), rows,
    )  # fmt: skip
    schedule = tpu_schedule.take(folder, "fused_conv1d_gdn_per_seq")
    return max(schedule.loops) / TILE, schedule.spills, aot.hbm_bytes(compiled)


if __name__ == "__main__":
    run(main)

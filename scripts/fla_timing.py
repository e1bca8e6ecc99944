"""Times flash-linear-attention's delta-rule kernels at the shapes of bench_device.py, which runs this apart: JSON.

python scripts/fla_timing.py      # needs torch, triton and fla, and a CUDA device

Prints {"model/rows x tokens/function": seconds}, the median of calls, of CUDA graphs where a call can be captured.
"""

import json

SHAPES = ((64, 1), (1, 2048), (1, 1))


def main() -> None:
    """Prints one JSON object on the last line."""
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    from fla.ops.kda import chunk_kda, fused_recurrent_kda

    # Model: key heads, value heads, decay for each channel, and functions of a prefill and of a decode step.
    models = {
        "Kimi Linear 48B": (32, 32, True, chunk_kda, fused_recurrent_kda),
        "Qwen3-Next 80B": (16, 32, False, chunk_gated_delta_rule, fused_recurrent_gated_delta_rule),
    }
    times = {}
    for model, (key_heads, heads, per_channel, chunk, recurrent) in models.items():
        for batch, tokens in SHAPES:
            function = recurrent if tokens == 1 else chunk
            inputs = make_inputs(torch, batch, tokens, key_heads, heads, per_channel)
            times[f"{model}/{batch}x{tokens}/{function.__name__}"] = seconds(torch, function, inputs)
    print(json.dumps(times))


def make_inputs(torch, batch: int, tokens: int, key_heads: int, heads: int, per_channel: bool, dim: int = 128) -> dict:
    """Keyword arguments, bfloat16 but for decays and states."""

    def normal(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device="cuda", dtype=dtype)

    decay = (heads, dim) if per_channel else (heads,)
    return {
        "q": normal(batch, tokens, key_heads, dim), "k": normal(batch, tokens, key_heads, dim),
        "v": normal(batch, tokens, heads, dim),
        "g": -0.1 * normal(batch, tokens, *decay, dtype=torch.float32).exp(),
        "beta": normal(batch, tokens, heads, dtype=torch.float32).sigmoid(),
        "initial_state": normal(batch, heads, dim, dim, dtype=torch.float32),
        "output_final_state": True, "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip


def seconds(torch, function, inputs: dict) -> float:
    """The median of a call's times; a graph's replays leave out what launching from Python takes."""
    from triton.testing import do_bench, do_bench_cudagraph

    def call():
        with torch.no_grad():
            function(**inputs)

    call()
    try:
        return do_bench_cudagraph(call, rep=50, return_mode="median") / 1e3
    except Exception:  # what cannot be captured is timed call by call
        torch.cuda.synchronize()
        return do_bench(call, warmup=10, rep=50, return_mode="median") / 1e3


if __name__ == "__main__":
    main()

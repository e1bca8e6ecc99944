"""A made-up run with every kind of entry: forks, gaps, a template rewrite, hostile names, cold samples."""

from __future__ import annotations

import random

from jaxhybrid.traces.record import CallRecord, ColdSample, MemorySample, RunHeader, RunRecord
from jaxhybrid.traces.simulate import PolicyResult

HEADER = RunHeader(model="demo", mode="forced", traces=("traces/one.jsonl", "traces/two.json"))
HOSTILE = "<script>alert('&\"')</script>"


def call(trajectory: str = "run-a", index: int = 0, **changes: object) -> CallRecord:
    """One plausible call: 900 resumed, 30 gap, 70 new, 41 generated."""
    fields: dict[str, object] = {
        "trajectory": trajectory,
        "call": index,
        "parent": index - 1 if index else None,
        "resumed": 900,
        "gap": 30,
        "new_tokens": 70,
        "generated": 41,
        "limited_by": "none",
        "ttft_s": 0.021,
        "decode_s": 0.4,
        "finish_reason": "stop",
        "started_s": 1.5 * index,
    } | changes
    resumed, gap, new = (int(str(fields[name])) for name in ("resumed", "gap", "new_tokens"))
    fields |= {"matched": resumed + gap, "prompt_tokens": resumed + gap + new}
    fields.setdefault("context_tokens", resumed + gap + new + int(str(fields["generated"])))
    return CallRecord(**fields)  # type: ignore[arg-type]


def trajectory_calls(name: str, count: int, seed: int, *, sub_agents: int = 0) -> list[CallRecord]:
    """A main branch of `count` calls that grows call by call; sub-agents of six calls leave it evenly."""
    chance = random.Random(seed)
    calls: list[CallRecord] = []
    tips: dict[str, int] = {}
    forks = {(each + 1) * count // (sub_agents + 1): f"reader-{each}" for each in range(sub_agents)}
    order = []
    for step in range(count):
        order.append("main")
        order += [forks[step]] * 6 if step in forks else []
    for index, branch in enumerate(order):
        parent = tips.get(branch, tips.get("main"))
        context = calls[parent].context_tokens if parent is not None else 0
        new = chance.randint(150, 900) if parent is not None else 1700
        gap = chance.choice((0, 0, 0, 0, chance.randint(3, 240))) if parent is not None else 0
        rewritten = gap > 150
        calls.append(
            call(
                name,
                index,
                branch=branch,
                parent=parent,
                resumed=max(0, context - gap),
                gap=min(gap, context),
                new_tokens=new,
                generated=chance.randint(20, 260),
                limited_by=("template" if rewritten else "recurrent")
                if gap
                else ("cold" if parent is None else "none"),
                differing=(context - gap, 151668, 198) if rewritten else None,
                ttft_s=(0.004 + 1.1e-4 * (new + gap)) * chance.uniform(0.8, 1.3),
                log_likelihood=-chance.uniform(40, 600),
                started_s=0.9 * index + seed,
            )
        )
        tips[branch] = index
    return calls


def memory_samples(count: int) -> tuple[MemorySample, ...]:
    return tuple(
        MemorySample(
            t_s=0.25 * step,
            bytes_by_kind={
                "latent": 40_000 * min(step, count - 20) + 1_000_000,
                "recurrent": 9_000_000 + (step % 37) * 350_000,
                "convolution": 600_000 + (step % 37) * 20_000,
                "logits": 130_000,
            },
            live_sequences=1 + step % 5,
            checkpoints=min(step // 3, 60),
        )
        for step in range(count)
    )


def policy(name: str, computed: int, gap: int, *, calls: int = 200, growth: int = 100_000) -> PolicyResult:
    perfect = 104_000
    return PolicyResult(
        policy=name,
        calls=calls,
        prompt_tokens=4_000_000,
        growth_tokens=growth,
        computed_tokens=computed,
        gap_tokens=gap,
        amplification=computed / growth,
        hit_rate=1 - computed / 4_000_000,
        extra_prefill=computed / perfect - 1,
        peak_checkpoints=0 if name == "none" else 123,
        gap_by_call=(0, *(gap * (40 - each) // 820 for each in range(40))),
    )


def policies() -> tuple[PolicyResult, ...]:
    gaps = {
        "perfect": 0,
        "none": 3_896_000,
        "prompt end": 31_000,
        "+ response end": 1_450,
        "+ turn start": 900,
        "+ junctions": 380,
        "+ message start": 210,
        "grid 512": 5_300,
        "grid 1600": 17_700,
        "grid 4096": 46_100,
    }
    return tuple(policy(name, 104_000 + gap, gap) for name, gap in gaps.items())


def run(trajectories: int = 5, calls: int = 40, *, interrupted: bool = False) -> RunRecord:
    names = [f"django__django-{11000 + each}" for each in range(trajectories - 1)] + [HOSTILE]
    recorded = [
        each
        for seed, name in enumerate(names)
        for each in trajectory_calls(name, calls - 3 * (seed % 7), seed, sub_agents=(0, 3, 1, 0, 5)[seed % 5])
    ]
    cold = tuple(
        ColdSample(context_tokens=size, cold_ttft_s=1.3e-4 * size, warm_ttft_s=0.03 + size * 1e-7)
        for size in (1_024, 4_096, 16_384, 24_000)
    )
    return RunRecord(
        model=HEADER.model,
        mode=HEADER.mode,
        traces=HEADER.traces,
        calls=tuple(recorded),
        memory=memory_samples(900),
        cold=cold,
        policies=policies(),
        counters={
            "recurrent_bytes_copied": 0,
            "kv_bytes_copied": 1_572_864,
            "compiled_programs": 9,
            "state_moves": 12,
            "restores": 381,
        },
        errors=("traces/one.jsonl:17: expected an object, got a list <b>bold</b>",),
        interrupted=interrupted,
        elapsed_s=93.5,
    )

"""Replays recorded agent traces through a hybrid model and reports what was computed, what was reused, and why.

python scripts/replay_traces.py --out=replay-report
python scripts/replay_traces.py --traces=runs/,more.jsonl --model=checkpoints/kimi --mode=score
python scripts/replay_traces.py --traces=runs/ --simulate

The figures published for block-hashed Weka sessions (what checkpoints cost beyond a perfect token-level cache; see
jaxhybrid/traces/simulate.py) come from whole blocks and a cache of its own for each session:

python scripts/replay_traces.py --simulate --traces=weka/ --study_block_size=64 --noshared_cache

Exit status: 0, also where some records or calls were skipped, which the report names; 1 if nothing could be done; 130
after Ctrl-C, with a report on what was done until then: the same command with --resume goes on. A second Ctrl-C ends
the program at once.
"""

from typing import Any, cast

from absl import app, flags

from jaxhybrid.command_line import run

TRACES = flags.DEFINE_list("traces", [], "Trace files or folders; the project's own recordings if none are named.")
MODEL = flags.DEFINE_string("model", None, "Checkpoint folder; the embedded demo model if none is named.")
MODE = flags.DEFINE_enum(
    "mode",
    "forced",
    ["forced", "score", "generate"],
    "Responses: forced, as recorded, token by token through the decode loop; score, in chunks; generate, by the model.",
)
OUT = flags.DEFINE_string("out", "replay-report", "Folder for run.jsonl, report.json and report.html.")
MAX_TRAJECTORIES = flags.DEFINE_integer("max_trajectories", None, "Stop after that many trajectories.", lower_bound=1)
FORMAT = flags.DEFINE_string("format", None, "Reader to use for every file; recognised by content if none is named.")
SIMULATE = flags.DEFINE_bool("simulate", False, "Study checkpoint policies on token ids alone, without the model.")
SHARED = flags.DEFINE_bool(
    "shared_cache", True, "In the policy study, all trajectories share one cache; off, each finds an empty one."
)
STUDY_BLOCK_SIZE = flags.DEFINE_integer(
    "study_block_size",
    0,
    "In the policy study, see prompts as whole blocks of this many tokens and no responses; 0 sees every token.",
    lower_bound=0,
)
SHARD = flags.DEFINE_string("shard", "0/1", "Take part i of n of the trajectories, as i/n.")
RESUME = flags.DEFINE_bool("resume", False, "Go on with the run in --out: calls on record are not replayed.")
SPLICE = flags.DEFINE_bool(
    "splice", True, "Put responses back in their own tokens where a prompt only retokenised them."
)
SWITCHES = flags.DEFINE_string("switches", "{}", 'Chat template variables as JSON, e.g. {"preserve_thinking": true}.')
MAX_SEQUENCES = flags.DEFINE_integer("max_sequences", 8, "Calls under way at once.", lower_bound=1)
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 131072, "Tokens of token-indexed state in the pool.", lower_bound=1)
MAX_CHECKPOINTS = flags.DEFINE_integer("max_checkpoints", 256, "Bundles retained at most.", lower_bound=0)
CACHE = flags.DEFINE_string("compilation_cache", None, "Folder for compiled programs; jax's default if none is named.")


def main(arguments: list[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected {arguments[1]!r}: name traces with --traces=FILE_OR_FOLDER,...")
    from jaxhybrid.traces.job import ReplayJob, run_job

    job = ReplayJob(
        traces=tuple(TRACES.value), model=MODEL.value, mode=cast(Any, MODE.value), out=OUT.value, format=FORMAT.value,
        max_trajectories=MAX_TRAJECTORIES.value, simulate=SIMULATE.value, shared_cache=SHARED.value,
        study_block_size=STUDY_BLOCK_SIZE.value,
        shard=SHARD.value, resume=RESUME.value, splice=SPLICE.value, switches=SWITCHES.value,
        max_sequences=MAX_SEQUENCES.value, max_tokens=MAX_TOKENS.value, max_checkpoints=MAX_CHECKPOINTS.value,
        compilation_cache=CACHE.value,
    )  # fmt: skip
    raise SystemExit(run_job(job))


if __name__ == "__main__":
    run(main)

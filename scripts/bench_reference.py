"""Times a reference implementation on a checkpoint folder, for bench_engine.py: prefill, then decode with its cache.

Needs the extra `oracle`; run by bench_engine.py in a process of its own, with the interpreter that has it.
"""

import json
import time

from absl import app, flags

FOLDER = flags.DEFINE_string("folder", None, "Checkpoint folder.", required=True)
BATCHES = flags.DEFINE_list("batches", ["1", "8"], "Batch sizes.")
PROMPT = flags.DEFINE_integer("prompt", 2048, "Prompt tokens.")
STEPS = flags.DEFINE_integer("steps", 32, "Decode steps.")
REPEATS = flags.DEFINE_integer("repeats", 3, "Timed runs; the median counts.")
THREADS = flags.DEFINE_integer("threads", 2, "Threads.")
SEED = flags.DEFINE_integer("seed", 0, "Of the prompts.")


def main(_: list[str]) -> None:
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS.value)
    model = AutoModelForCausalLM.from_pretrained(FOLDER.value, dtype=torch.float32).eval()
    results = {}
    for batch in map(int, BATCHES.value):
        rng = np.random.default_rng(SEED.value)
        ids = torch.tensor(rng.integers(3, model.config.vocab_size, (batch, PROMPT.value)))
        prefills: list[float] = []
        decodes: list[float] = []
        made: list[list[int]] = []
        with torch.no_grad():
            for _repeat in range(REPEATS.value if batch == 1 else 1):
                started = time.perf_counter()
                out = model(ids, use_cache=True, logits_to_keep=1)
                prefilled = time.perf_counter()
                cache = getattr(out, "cache", None) or out.past_key_values
                name = "cache" if getattr(out, "cache", None) is not None else "past_key_values"
                made = []
                for _step in range(STEPS.value):
                    token = out.logits[:, -1].argmax(-1, keepdim=True)
                    made.append(token[:, 0].tolist())
                    out = model(token, use_cache=True, **{name: cache})
                prefills.append(prefilled - started)
                decodes.append(time.perf_counter() - prefilled)
        results[batch] = {
            "prefill_s": float(np.median(prefills)),
            "decode_s": float(np.median(decodes)),
            "tokens": np.array(made).T.tolist(),
        }
    print("RESULT " + json.dumps(results))


if __name__ == "__main__":
    app.run(main)

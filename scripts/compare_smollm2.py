"""Perplexity of a text and a greedy answer by a trained model, here and with `transformers`, from the same folder.

python scripts/compare_smollm2.py --folder=smollm2 --reference_python=PYTHON

PYTHON has the extra `oracle`. The folder is one that convert_smollm2.py wrote, or any checkpoint with a chat template.
Ends with status 1 if the perplexities differ by more than 1e-4 of themselves or the answers differ in a token.
"""

import json
import math
import subprocess
import sys
from typing import Any

from absl import app, flags

FOLDER = flags.DEFINE_string("folder", None, "Checkpoint folder.", required=True)
REFERENCE = flags.DEFINE_string("reference_python", sys.executable, "Interpreter with transformers.")
SIDE = flags.DEFINE_enum("side", "both", ["both", "reference"], "Internal: `reference` prints that side's result.")
ANSWER_TOKENS = flags.DEFINE_integer("answer_tokens", 64, "At most that many tokens of answer.")

TOLERANCE = 1e-4
QUESTION = "What is the capital of France, and which river runs through it?"
TEXT = """The lighthouse keeper climbed the stairs every evening at six, counting them as he went, although he had known
for thirty years that there were a hundred and twelve. At the top he lit the lamp, wiped the glass with a dry cloth and
wrote the time in a book. When fog came in from the sea he also rang the bell, once a minute, until it lifted. He said
that the ships did not need him any more, since every one of them knew by satellite where it was to within a metre. But
nobody had told him to stop, and the light had never been out on his watch. In winter his sister sent him oranges. He
ate one on each Sunday, sitting on the rocks in his coat, and threw the peel to the gulls, who did not want it."""


def perplexity(log_probs: Any) -> float:
    return math.exp(-sum(log_probs) / len(log_probs))


def reference_result() -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER.value)
    model = AutoModelForCausalLM.from_pretrained(FOLDER.value, dtype=torch.float32, attn_implementation="eager").eval()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=False
    )
    prompt_ids = tokenizer(prompt, return_tensors="pt").input_ids
    text = tokenizer(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        scores = model(text).logits[0, :-1].log_softmax(-1).gather(-1, text[0, 1:, None])[:, 0]
        made = model.generate(prompt_ids, max_new_tokens=ANSWER_TOKENS.value, do_sample=False)
    answer = made[0, prompt_ids.shape[1] :].tolist()
    if answer and answer[-1] == model.generation_config.eos_token_id:
        answer.pop()
    return {
        "runtime": "transformers",
        "prompt": prompt_ids[0].tolist(),
        "text": text[0].tolist(),
        "perplexity": perplexity(scores.tolist()),
        "answer": answer,
    }


def own_result() -> tuple[dict[str, Any], str]:
    import jax
    import numpy as np

    import jaxhybrid as jh

    model = jh.load_model(FOLDER.value)
    engine = jh.Engine(model, jh.EngineConfig(max_sequences=1, max_tokens=2048, prefill_chunks=(64,)))
    prompt = list(model.tokenizer.render([{"role": "user", "content": QUESTION}]).token_ids)
    text = model.tokenizer.encode(TEXT)
    scores = np.asarray(jax.nn.log_softmax(jh.forward(model, text)[:-1]))
    stops = model.generation_defaults.stop_token_ids
    sampling = jh.Sampling(max_tokens=ANSWER_TOKENS.value, stop_token_ids=stops)
    answer = engine.generate([engine.prefill(prompt)], sampling)[0].tokens
    result = {
        "runtime": "jaxhybrid",
        "prompt": prompt,
        "text": text,
        "perplexity": perplexity(scores[np.arange(len(text) - 1), text[1:]].tolist()),
        "answer": list(answer),
    }
    return result, model.tokenizer.decode(answer)


def run_reference() -> dict[str, Any]:
    options = [f"--folder={FOLDER.value}", f"--answer_tokens={ANSWER_TOKENS.value}", "--side=reference"]
    command = [REFERENCE.value, __file__, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        raise SystemExit(f"the reference failed:\n{done.stderr[-2000:]}")
    return json.loads(line.removeprefix("RESULT "))


def main(_: list[str]) -> None:
    if SIDE.value == "reference":
        print("RESULT " + json.dumps(reference_result()))
        return
    reference = run_reference()
    own, answer = own_result()
    for result in (own, reference):
        print(f"{result['runtime']:>12}: perplexity {result['perplexity']:.6f} over {len(result['text'])} tokens")
        print(f"{'':>12}  answer {result['answer']}")
    print(f"{'':>12}  {answer!r}")
    apart = abs(own["perplexity"] / reference["perplexity"] - 1)
    unequal = [part for part in ("prompt", "text", "answer") if own[part] != reference[part]]
    if apart > TOLERANCE or unequal:
        raise SystemExit(f"perplexities differ by {apart:.1e} of themselves; unequal tokens: {unequal or 'none'}")
    print(f"{'':>12}  the same tokens; perplexities {apart:.1e} apart")


if __name__ == "__main__":
    app.run(main)

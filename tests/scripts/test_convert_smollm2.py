"""The parts of the GGUF conversion that need no GGUF."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "convert_smollm2.py"

# In a process of its own: the script defines flags.
PROBE = """
import json, runpy, sys
import numpy as np

script = runpy.run_path(sys.argv[1])
tokens = ["<s>", "<e>", "a", "b", "Ġ", "1", "2", "ab", "12", "Ġa", "Ċ"]
merges = ["a b", "1 2", "Ġ a"]
kinds = [3, 3] + [1] * (len(tokens) - 2)
fields = {f"tokenizer.ggml.{name}": value for name, value in
          (("tokens", tokens), ("token_type", kinds), ("merges", merges))}
tokenizer = script["tokenizer_of"](fields)
ids = tokenizer.encode("ab a<e>12 a\\n").ids
weight = np.arange(2 * 6 * 5).reshape(12, 5)
print(json.dumps({
    "names": [script["published_name"](name) for name in ("token_embd.weight", "blk.12.ffn_down.weight")],
    "ids": ids,
    "text": tokenizer.decode(ids, skip_special_tokens=False),
    "rows": script["halves_from_pairs"](weight, 2).tolist(),
}))
"""


def test_names_rows_and_tokenizer():
    done = subprocess.run([sys.executable, "-c", PROBE, str(SCRIPT)], capture_output=True, text=True, check=True)
    made = json.loads(done.stdout)
    assert made["names"] == ["model.embed_tokens.weight", "model.layers.12.mlp.down_proj.weight"]
    # A special token is one, digits stay apart although there is a token for both, and a space goes with its word.
    assert made["ids"] == [7, 9, 1, 5, 6, 9, 10]
    assert made["text"] == "ab a<e>12 a\n"
    # Pair i of a head is rows 2i and 2i + 1 in GGUF, rows i and i + 3 of its six here.
    rows = np.array(made["rows"])
    for head in range(2):
        for pair in range(3):
            for half in range(2):
                expected = np.arange(5) + 5 * (6 * head + 2 * pair + half)
                np.testing.assert_array_equal(rows[6 * head + 3 * half + pair], expected)

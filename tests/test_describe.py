"""Sizes computed from published configurations, against the published ones and those of the families' papers."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from jaxhybrid.description import Description, describe
from jaxhybrid.models import translate

ROOT = Path(__file__).parents[1]
CONFIGS = {path.stem: path for path in sorted(ROOT.glob("configs/*.json"))}

# Published billions of parameters; bytes a token in bfloat16 of layers that see everything; tokens that equal one
# snapshot of float32 recurrent state.
TABLE = {
    "bamba-9b": (9.78, 12288, 10018),
    "deepseek-v2-lite": (15.7, 31104, 0),
    "deepseek-v2": (236, 69120, 0),
    "deepseek-v3": (671, 70272, 0),
    "deepseek-v3.2": (671, 85888, 0),
    "deepseek-v4-flash": (284, 6880, None),
    "deepseek-v4-pro": (1573, 9848, None),
    "falcon-h1-0.5b": (0.52, 18432, 1557),
    "gemma-3-1b": (1.0, 4096, 0),
    "gemma-3-4b": (3.88, 20480, 0),
    "gemma-3-27b": (27.0, 81920, 0),
    "glm-5": (744, 109824, 0),
    "glm-5.2": (744, 95232, 0),
    "gpt-oss-120b": (116.83, 36864, 0),
    "gpt-oss-20b": (20.91, 24576, 0),
    "granite-4.0-h-1b": (1.461, 8192, 7000),
    "granite-4.0-h-small": (32.2, 16384, 9327),
    "jamba-1.5-large": (398, 36864, 1960),
    "jamba-1.5-mini": (51.6, 16384, 980),
    "kimi-k2": (1026, 70272, 0),
    "kimi-k3": (2780, 27648, 16253),
    "kimi-linear-48b-a3b": (49.1, 8064, 5384),
    "llama-3.1-8b": (8.03, 131072, 0),
    "mistral-7b-v0.1": (7.24, 0, 0),
    "nemotron-3-nano-30b-a3b": (31.6, 6144, 7989),
    "nemotron-3-super-120b-a12b": (120.6, 8192, 20780),
    "nemotron-3-ultra-550b-a55b": (550, 12288, 33200),
    "nemotron-h-8b": (8.1, 16384, 6234),
    "qwen2.5-7b": (7.62, 57344, 0),
    "qwen3-30b-a3b": (30.5, 98304, 0),
    "qwen3-8b": (8.19, 147456, 0),
    "qwen3-next-80b-a3b": (80, 24576, 3144),
    "qwen3.5-0.8b": (0.87, 12288, 1590),
    "qwen3.5-9b": (9.65, 32768, 1572),
    "qwen3.5-27b": (27.8, 65536, 2349),
    "qwen3.5-35b-a3b": (36.0, 20480, 3144),
    "qwen3.5-122b-a10b": (125.1, 24576, 6252),
    "qwen3.5-397b-a17b": (403, 30720, 6252),
}
WITH_PREDICTION = "qwen3.5"  # published with the prediction layer counted
# Published billions that a token passes. Of those the embedding counts for one row only.
ACTIVE = {
    "deepseek-v4-pro": 49,
    "jamba-1.5-large": 94,
    "gpt-oss-20b": 3.61,
    "gpt-oss-120b": 5.13,
    "kimi-k3": 104,
    "nemotron-3-nano-30b-a3b": 3.2,
    "nemotron-3-ultra-550b-a55b": 55,
}


def described(name: str, state_dtype: str = "float32") -> Description:
    return describe(translate(json.loads(CONFIGS[name].read_text()), name), "bfloat16", state_dtype)


def test_every_configuration_has_its_row() -> None:
    assert sorted(TABLE) == sorted(CONFIGS)


@pytest.mark.parametrize("name", CONFIGS)
def test_published_sizes(name: str) -> None:
    billions, bytes_per_token, snapshot = TABLE[name]
    model = described(name)
    counted = model.parameters + (model.mtp_parameters if name.startswith(WITH_PREDICTION) else 0)
    assert counted / 1e9 == pytest.approx(billions, rel=0.005)
    assert model.bytes_per_token - model.windowed_bytes_per_token == bytes_per_token
    assert snapshot in (None, round(model.snapshot_tokens))
    if name in ACTIVE:
        assert model.active / 1e9 == pytest.approx(ACTIVE[name], rel=0.01)
    assert model.active <= model.parameters
    assert abs(model.weight_bytes / 2 / (model.parameters + model.mtp_parameters) - 1) < 0.02  # a few are float32


@pytest.mark.parametrize(("name", "tokens"), [("kimi-linear-48b-a3b", 2783), ("kimi-k3", 8403)])
def test_a_snapshot_in_bfloat16(name: str, tokens: int) -> None:
    assert round(described(name, "bfloat16").snapshot_tokens) == tokens


def test_schedules_are_written_as_they_repeat() -> None:
    assert described("kimi-linear-48b-a3b").schedule == (
        "kimi_delta + dense, 6 x (2 x kimi_delta + moe, latent_attention + moe, kimi_delta + moe), "
        "kimi_delta + moe, latent_attention + moe"
    )
    assert described("gpt-oss-20b").schedule == "12 x (attention(128) + moe, attention + moe)"


def test_sequences_that_fit() -> None:
    model = replace(
        described("qwen3-next-80b-a3b"), weight_bytes=1000, bytes_per_sequence=200, logits_bytes=8, bytes_per_token=3
    )
    # A context of 10 takes 3 pages of 4: 208 + 36 bytes a sequence.
    assert [model.sequences(memory, 10, 4) for memory in (900, 1243, 1244, 1487, 1488)] == [0, 0, 1, 1, 2]


def test_the_script_prints_them() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "describe_model.py")]
    done = subprocess.run(
        [*command, "kimi-linear-48b-a3b", "--memory_gib=141"], capture_output=True, text=True, check=True
    )
    shown = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    assert {name.strip(): text.strip() for name, text in shown.items()} == {
        "parameters": "49.12 B, 3.11 B of them active per token",
        "layers": described("kimi-linear-48b-a3b").schedule,
        "weights": "91.5 GiB (bfloat16)",
        "state per token": "8,064 bytes",
        "state per sequence": "43,417,600 bytes, and 655,360 of logits",
        "a snapshot equals": "5,384 tokens",
        "sequences of 8k": "482 in 141 GiB",
        "sequences of 128k": "48 in 141 GiB",
        "sequences of 1M": "6 in 141 GiB",
    }
    wrong = subprocess.run([*command, "no-such-model"], capture_output=True, text=True, check=False)
    assert wrong.returncode != 0
    assert "no-such-model: expected a file of configs/" in wrong.stdout + wrong.stderr

"""What a user gets wrong is one line on stderr and exit status 1, in every script that a user runs."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def check_refused(done: subprocess.CompletedProcess[str], message: str) -> None:
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
    assert (done.returncode, done.stdout) == (1, "")


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        (
            "describe_model",
            ["qwen3-8b", "--dtype=foo"],
            "--dtype=foo: value should be one of <bfloat16|float16|float32>",
        ),
        ("describe_model", ["qwen3-8b", "--memory_gib=nan"], "--memory_gib=nan: expected a number"),
        ("describe_model", ["qwen-0"], "qwen-0: expected a file of configs/, a config.json, or a folder that has one"),
        ("describe_model", [], "expected one name of bamba-9b, "),
        ("show_kernels", ["--config=qwen3-8b", "--shapes=0x1"], "--shapes: expected rows x tokens, both at least 1, "),
        ("show_kernels", ["--config=qwen3-8b", "--shapes=-1x1"], "such as 64x1, got '-1x1'"),
        ("show_kernels", ["--config=qwen3-8b", "--shapes="], "such as 64x1, got ''"),
        ("show_kernels", ["--config=none.json"], "none.json: expected a file of configs/, a config.json, or a folder"),
        ("show_kernels", [], "--config=None: Flag --config must have a value other than None"),
        ("tpu_schedule", ["--parts=h200"], "--parts=['h200']: expected some of tpu-v5e, "),
        ("bench_engine", ["--lengths=1k"], "--lengths=['1k']: expected numbers of tokens"),
        ("bench_engine", ["--sections=a,e"], "--sections=['a', 'e']: expected some of a, b, c, d"),
        ("make_support_table", ["--results=none.xml"], "No such file or directory: 'none.xml'"),
        ("make_support_table", [f"--results={__file__}"], "test_user_errors.py: expected JUnit XML: not well-formed"),
        ("replay_traces", ["--moed=score"], "Unknown command line flag 'moed'. Did you mean: mode"),
    ],
)
def test_wrong_arguments(name, arguments, message):
    check_refused(run_script(name, *arguments), message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "expected JSON: Expecting property name"),
        (b"[]", "expected a JSON object, found list"),
        (b'"\xff"', "expected JSON: 'utf-8' codec can't decode byte 0xff"),
        (b"{}", "model_type"),
        (b'{"model_type": "new"}', "unknown model_type 'new', expected one of bamba, "),
    ],
)
def test_broken_configs(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    done = run_script("describe_model", str(tmp_path))
    check_refused(done, message)
    assert str(tmp_path / "config.json") in done.stderr


def test_a_broken_config_has_no_kernels(tmp_path):
    (tmp_path / "config.json").write_text("{")
    check_refused(run_script("show_kernels", f"--config={tmp_path}"), "expected JSON")


def test_a_table_in_a_pipe_is_not_cut():
    done = run_script("show_kernels", "--config=deepseek-v4-flash", "--platform=h200", "--arguments")
    assert done.returncode == 0
    assert "compressed_attention" in done.stdout
    assert "…" not in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith("│")]
    assert {row.split()[1] for row in rows} == {"1", "64"}  # one line a row

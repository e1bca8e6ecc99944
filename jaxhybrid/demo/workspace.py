"""A scratch copy of a small Python package, and the tools an agent works on it with.

Every tool really runs. Its output is text without the scratch path, timings or what else differs from run to run.
"""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TEST_TIMEOUT_S = 5
MAX_MATCHES = 20


def _function(name: str, description: str, /, **parameters: str) -> dict[str, Any]:
    """An OpenAI function schema; a parameter's text starts with its type, and ends with '?' if it is optional."""
    properties, required = {}, []
    for key, text in parameters.items():
        kind, _, meaning = text.removesuffix("?").partition(": ")
        properties[key] = {"type": kind, "description": meaning}
        if not text.endswith("?"):
            required.append(key)
    schema = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS: list[dict[str, Any]] = [
    _function("list_files", "List the files below a folder with their line counts.", path="string: folder"),
    _function(
        "grep",
        "Search files for a regular expression.",
        pattern="string: regular expression",
        path="string: file or folder",
    ),
    _function(
        "read_file",
        "Read lines of a file.",
        path="string: file",
        start="integer: first line, from 1?",
        end="integer: last line?",
    ),
    _function(
        "edit_file",
        "Replace a text that occurs once in a file.",
        path="string: file",
        old="string: text to replace",
        new="string: text to put there",
    ),
    _function("run_tests", "Run the tests, or those of one module.", module="string: test module?"),
    _function(
        "delegate",
        "Hand a question to a helper that sees this conversation; returns its report.",
        name="string: name of the helper",
        task="string: what to find out",
    ),
]


class Workspace:
    """Files below `root`, and the tools over them. A tool's failure is text for the agent, never an exception."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._tools: dict[str, Callable[..., str]] = {
            "list_files": self.list_files,
            "grep": self.grep,
            "read_file": self.read_file,
            "edit_file": self.edit_file,
            "run_tests": self.run_tests,
        }

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        return self._tools[name](**arguments)

    def write(self, path: str, text: str) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def read(self, path: str) -> str:
        return (self.root / path).read_text(encoding="utf-8")

    def list_files(self, path: str = ".") -> str:
        files = self._files(path)
        lines = [f"{name} ({len(self.read(name).splitlines())} lines)" for name in files]
        return "\n".join(lines) or f"no files below {path}"

    def grep(self, pattern: str, path: str = ".") -> str:
        hits = [
            f"{name}:{number}: {line.strip()}"
            for name in self._files(path)
            for number, line in enumerate(self.read(name).splitlines(), 1)
            if re.search(pattern, line)
        ]
        if len(hits) > MAX_MATCHES:
            hits = [*hits[:MAX_MATCHES], f"... {len(hits) - MAX_MATCHES} more"]
        return "\n".join(hits) or "no matches"

    def read_file(self, path: str, start: int = 1, end: int | None = None) -> str:
        if not (self.root / path).is_file():
            return f"error: no file {path}"
        lines = self.read(path).splitlines()
        last = len(lines) if end is None else min(end, len(lines))
        return "\n".join([f"{path}, lines {start} to {last} of {len(lines)}", *lines[start - 1 : last]])

    def edit_file(self, path: str, old: str, new: str) -> str:
        if not (self.root / path).is_file():
            return f"error: no file {path}"
        text = self.read(path)
        if text.count(old) != 1:
            return f"error: the text occurs {text.count(old)} times in {path}, expected once"
        self.write(path, text.replace(old, new))
        return f"edited {path} at line {text[: text.index(old)].count(chr(10)) + 1}"

    def run_tests(self, module: str | None = None) -> str:
        target = [module] if module else ["discover", "-s", "tests", "-t", "."]
        command = [sys.executable, "-B", "-W", "ignore", "-m", "unittest", *target]
        try:
            done = subprocess.run(command, cwd=self.root, capture_output=True, text=True, timeout=TEST_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return "error: the tests did not finish in time"
        return self._normalise(done.stdout + done.stderr)

    def _files(self, path: str) -> list[str]:
        base = self.root / path
        found = [base] if base.is_file() else sorted(base.rglob("*"))
        return [str(file.relative_to(self.root)) for file in found if file.is_file()]

    def _normalise(self, text: str) -> str:
        text = text.replace(str(self.root.resolve()), "/workspace").replace(str(self.root), "/workspace")
        text = text.replace(sys.base_prefix, "/python")
        text = re.sub(r" in \d+\.\d+s", "", text)
        text = re.sub(r"0x[0-9a-f]{6,}", "0x0", text)
        text = re.sub(r"^\s*[\^~]+\n", "", text, flags=re.MULTILINE)
        return text.strip()

"""An agent without a model: a script that works on a scratch package with real tools, and is recorded doing so.

The script knows the planted bug and plays the search for it. What it says comes from a few phrasings and from what the
tools answered.
"""

import ast
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxhybrid.demo.recorder import Conversation, Recording
from jaxhybrid.demo.scratch import Bug, build_package, plant_bug
from jaxhybrid.demo.workspace import Workspace

PACKAGES = ("toolbox", "basics", "kit", "corelib", "helpers", "library", "tools", "common", "support", "parts")
SYSTEM = (
    "You are a coding agent. You work on a Python package in the current folder with the tools you are given. "
    "Look before you edit, keep changes small, and run the tests after every change."
)


@dataclass
class Script:
    """One run: the conversation, what it works on, and the dice that choose wording and course."""

    talk: Conversation
    workspace: Workspace
    package: str
    bug: Bug
    others: list[str]
    rng: random.Random

    def say(self, *phrasings: str) -> str:
        return self.rng.choice(phrasings)


def record(root: Path, trajectory_id: str, module: str, others: list[str], seed: int) -> Recording:
    """Build a scratch package in the empty folder `root`, plant a bug in `module`, and record the search for it."""
    rng = random.Random(f"{trajectory_id}-{seed}")
    workspace = Workspace(root)
    package = rng.choice(PACKAGES)
    build_package(workspace, package, [module, *others])
    bug = plant_bug(workspace, package, module, rng)
    recording = Recording(trajectory_id, workspace)
    talk = Conversation(recording, "main", [{"role": "system", "content": SYSTEM}])
    script = Script(talk, workspace, package, bug, others, rng)
    _look_around(script)
    _find_failure(script)
    if rng.random() < 0.7:
        _delegate(script)
    _locate(script)
    _repair(script)
    if rng.random() < 0.7:
        _ask_again(script)
    _follow_up(script)
    return recording


def _look_around(script: Script) -> None:
    say, package = script.say, script.package
    script.talk.user(
        say(
            f"Some tests of {package} fail since yesterday. Find out why and fix it.",
            f"The tests of the package {package} are red. Please repair the code, not the tests.",
            f"Something is wrong in {package}/{script.bug.module}.py. Track it down and fix it.",
            f"Run the tests of {package}, find the cause of any failure and correct it.",
        )
    )
    script.talk.use(
        say(
            "I start with an overview of the files.",
            "First I need to know what is here.",
            "Let me see how the package is laid out before I run anything.",
        ),
        ("list_files", {"path": "."}),
        say=say("I'll look at the files first.", "Let me list the files.", ""),
    )
    if script.rng.random() < 0.5:
        script.talk.use(
            say("The readme says what each module is for.", "The readme may explain how the tests are run."),
            ("read_file", {"path": "README.md"}),
        )


def _find_failure(script: Script) -> None:
    say, bug = script.say, script.bug
    (report,) = script.talk.use(
        say("Now the tests, to see what fails.", "Let me run all the tests.", "The test run shows where to look."),
        ("run_tests", {}),
        say=say("Running the tests.", "", "Now I run the tests."),
    )
    failed = _failed_tests(report)
    script.talk.use(
        say(
            f"{len(failed)} of the tests fail, all in tests/test_{bug.module}.py. I read that file.",
            f"The failures come from test_{bug.module}: {', '.join(failed)}. What do they expect?",
            f"{failed[0]} fails. I look at what the test checks.",
        ),
        ("grep", {"pattern": failed[0], "path": "tests"}),
        ("read_file", {"path": f"tests/test_{bug.module}.py", "start": 1, "end": 40}),
        say=say(f"The failing test is {failed[0]}.", "", "Let me look at the failing test."),
    )


def _delegate(script: Script) -> None:
    """Two helpers look at two questions side by side, each from the conversation as it stands."""
    say, bug, package = script.say, script.bug, script.package
    jobs = [
        ("callers", f"Find where {bug.function} is used in {package} and report the places."),
        ("outline", f"Report which functions and classes {package}/{bug.module}.py defines."),
    ]
    if script.others and script.rng.random() < 0.6:
        jobs.append(("neighbour", f"Report what {package}/{script.others[0]}.py is for, from its docstring."))
    script.talk.request(
        say(
            f"The cause is probably near {bug.function}. Helpers can look at its surroundings while I read on.",
            "Some of this can be looked up side by side.",
            f"Before I touch {bug.function} I want to know who depends on it.",
        ),
        *(("delegate", {"name": name, "task": task}) for name, task in jobs),
        say=say("I hand out two questions.", "", "Let me get help with this."),
    )
    reports = [_helper(script, name, task) for name, task in jobs]
    for index, report in enumerate(reports):
        script.talk.result(index, report)


def _helper(script: Script, name: str, task: str) -> str:
    bug, package = script.bug, script.package
    helper = script.talk.fork(name, task)
    path = f"{package}/{bug.module}.py"
    if name == "callers":
        (hits,) = helper.use(
            f"A search for {bug.function} answers this.", ("grep", _pattern(rf"\b{bug.function}\(", package))
        )
        lines = [hit for hit in hits.splitlines() if f"def {bug.function}" not in hit]
        report = f"{bug.function} is used in {len(lines)} places:\n" + "\n".join(f"- {line}" for line in lines[:6])
        if not lines:
            report = f"{bug.function} is not called by name inside {package}; only users of the package call it."
    elif name == "outline":
        (hits,) = helper.use("Definitions start with def or class.", ("grep", _pattern(r"^(def|class) \w+", path)))
        names = re.findall(r"(?:def|class) (\w+)", hits)
        helper.use("The head of the file says what it is for.", ("read_file", {"path": path, "start": 1, "end": 15}))
        report = f"{path} defines {len(names)} names at top level: {', '.join(names[:12])}."
    else:
        other = f"{package}/{script.others[0]}.py"
        helper.use("The docstring stands at the top.", ("read_file", {"path": other, "start": 1, "end": 20}))
        doc = (ast.get_docstring(ast.parse(script.workspace.read(other))) or "It has no docstring.").splitlines()[0]
        report = f"{other}: {doc}"
    helper.answer("That is all I was asked for.", report)
    return report


def _locate(script: Script) -> None:
    say, bug = script.say, script.bug
    (hits,) = script.talk.use(
        say(
            f"The value comes out of {bug.function}. Where is it defined?",
            f"I suspect {bug.function}. Let me find it.",
            f"Next: the definition of {bug.function}.",
        ),
        ("grep", _pattern(rf"def {bug.function}\(", script.package)),
        say=say("", f"Looking for {bug.function}."),
    )
    start = max(1, bug.number - script.rng.randint(8, 25))
    script.talk.use(
        say(
            f"It is here: {hits.splitlines()[0]}. I read the lines around line {bug.number}.",
            f"Now the body of {bug.function}.",
            "I read the function with some lines before and after it.",
        ),
        ("read_file", {"path": bug.path, "start": start, "end": bug.number + script.rng.randint(8, 25)}),
    )
    if script.rng.random() < 0.4:
        script.talk.use(
            say("I also check the other definitions in this file.", "Other functions may share the mistake."),
            ("grep", _pattern(r"^\s*(def|class) ", bug.path)),
        )


def _repair(script: Script) -> None:
    say, bug = script.say, script.bug
    if script.rng.random() < 0.6:
        _shorten_old_result(script)
    if script.rng.random() < 0.3:
        _edit_that_misses(script)
    old, new = _unique_edit(script.workspace.read(bug.path), bug)
    script.talk.use(
        say(
            f"Line {bug.number} reads `{bug.bad.strip()}`. It must be `{bug.good.strip()}`.",
            f"Here is the mistake: `{bug.bad.strip()}` in {bug.function}. I change it to `{bug.good.strip()}`.",
            f"`{bug.bad.strip()}` cannot be right: the test expects what `{bug.good.strip()}` gives.",
        ),
        ("edit_file", {"path": bug.path, "old": old, "new": new}),
        say=say("I found the mistake and fix it.", f"The mistake is in line {bug.number} of {bug.path}.", ""),
    )
    (report,) = script.talk.use(
        say("Do the tests of this module pass now?", f"First the tests of {bug.module} alone."),
        ("run_tests", {"module": f"tests.test_{bug.module}"}),
        say=say("", "Checking."),
    )
    passed = "all pass" if report.endswith("OK") else "do not all pass"
    (full,) = script.talk.use(f"They {passed}. Now the whole suite.", ("run_tests", {}))
    total = re.findall(r"Ran (\d+) test", full)[0]
    script.talk.answer(
        say("Everything is green, so I can report.", "Done; a short summary."),
        say(
            f"Fixed. In `{bug.path}`, function `{bug.function}`, line {bug.number} said `{bug.bad.strip()}`; "
            f"it says `{bug.good.strip()}` now. All {total} tests pass.",
            f"The cause was one line of `{bug.function}` in `{bug.path}`:\n\n```diff\n-{bug.bad}\n+{bug.good}\n```\n\n"
            f"After the change all {total} tests pass.",
        ),
    )


def _shorten_old_result(script: Script) -> None:
    """Put a note in the place of the longest tool result, as clients do when a context grows."""
    messages = script.talk.messages
    longest = max((m["role"] == "tool", len(m["content"]), i) for i, m in enumerate(messages))[2]
    size = len(messages[longest]["content"].splitlines())
    script.talk.shorten_result(longest, f"[{size} lines, left out to save room]")


def _edit_that_misses(script: Script) -> None:
    bug = script.bug
    wrong = bug.bad.strip() + "  # here"
    script.talk.use(
        f"I replace line {bug.number}.",
        ("edit_file", {"path": bug.path, "old": wrong, "new": bug.good.strip()}),
    )


def _ask_again(script: Script) -> None:
    bug = script.bug
    script.talk.ask_again(
        script.say("I say it in fewer words.", "Once more, shorter."),
        f"`{bug.function}` in `{bug.path}` was wrong in line {bug.number}: "
        f"`{bug.bad.strip()}` is `{bug.good.strip()}` again.",
    )


def _follow_up(script: Script) -> None:
    """A second user turn: a question about the code, answered from what the tools show."""
    say, bug, package = script.say, script.bug, script.package
    target = script.rng.choice([bug.module, *script.others])
    path = f"{package}/{target}.py"
    function = _documented_function(script.workspace.read(path), script.rng)
    if function is None:
        script.talk.user(f"Thanks. How long is {path}?")
        (files,) = script.talk.use("list_files gives line counts.", ("list_files", {"path": package}))
        line = next(row for row in files.splitlines() if row.startswith(path))
        script.talk.answer("The list has it.", f"`{line}`.")
        return
    script.talk.user(
        say(
            f"Thanks. And what does {function.name} in {path} do?",
            f"Good. Please explain {function.name} of {target} to me.",
            f"One more thing: where is {function.name} defined, and what is it for?",
        )
    )
    script.talk.use(
        say(f"I look {function.name} up.", f"Where is {function.name}?"),
        ("grep", _pattern(rf"def {function.name}\b", package)),
    )
    end = min(function.end_lineno or function.lineno, function.lineno + 45)
    script.talk.use(
        say("Now its body and docstring.", "I read it before I answer."),
        ("read_file", {"path": path, "start": function.lineno, "end": end}),
    )
    doc = (ast.get_docstring(function) or "").split("\n\n")[0].replace("\n", " ")
    arguments = ", ".join(a.arg for a in function.args.args)
    script.talk.answer(
        say("Its docstring says it.", "I can answer now."),
        f"`{function.name}({arguments})` is defined in `{path}`, line {function.lineno}. {doc}",
    )


def _documented_function(source: str, rng: random.Random) -> ast.FunctionDef | None:
    functions = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and ast.get_docstring(n)]
    return rng.choice(functions) if functions else None


def _failed_tests(report: str) -> list[str]:
    return re.findall(r"^(?:FAIL|ERROR): (\w+)", report, flags=re.MULTILINE)


def _pattern(pattern: str, path: str) -> dict[str, Any]:
    return {"pattern": pattern, "path": path}


def _unique_edit(source: str, bug: Bug) -> tuple[str, str]:
    """The bad line and as many lines before it as make the text occur once, and the same with the good line."""
    lines = source.splitlines()
    for first in range(bug.number - 1, -1, -1):
        before = lines[first : bug.number - 1]
        old = "\n".join([*before, bug.bad])
        if source.count(old) == 1:
            return old, "\n".join([*before, bug.good])
    raise ValueError(f"line {bug.number} of {bug.path} cannot be told from its surroundings")

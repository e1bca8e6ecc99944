"""The report: its numbers are the record's, its bars add up, its page is closed to the outside and to hostile names."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest
import synthetic_run
from rich.console import Console
from synthetic_run import HOSTILE, call

from jaxhybrid.traces import svg_plots, svg_timelines, units
from jaxhybrid.traces.progress import Progress
from jaxhybrid.traces.record import ColdSample, MemorySample, RunRecord, read_json
from jaxhybrid.traces.report_html import render, write_report
from jaxhybrid.traces.report_table import print_table
from jaxhybrid.traces.summary import limits, response_end_pair, total
from jaxhybrid.traces.svg_canvas import Scale

VOID = {"meta", "link", "img", "br", "hr", "input"}


@dataclass
class Node:
    tag: str
    attributes: dict[str, str]
    children: list[Node] = field(default_factory=list)
    words: str = ""

    def all(self, tag: str, class_: str = "") -> list[Node]:
        """Descendants by tag and, if named, by one of their classes."""
        found = []
        for child in self.children:
            if child.tag == tag and (not class_ or class_ in child.attributes.get("class", "").split()):
                found.append(child)
            found += child.all(tag, class_)
        return found

    def text(self) -> str:
        return " ".join([self.words, *(child.text() for child in self.children)])


class Tree(HTMLParser):
    """A page as nodes. Fails on a tag closed out of order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.root = Node("", {})
        self._open = [self.root]
        self.feed(page)
        assert self._open == [self.root], f"never closed: {[node.tag for node in self._open]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        self._open[-1].children.append(node)
        if tag not in VOID:
            self._open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Node(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"expected </{self._open[-1].tag}>, got </{tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].words += data


@pytest.fixture(scope="module")
def run() -> RunRecord:
    return synthetic_run.run(5, 24)


@pytest.fixture(scope="module")
def page(run: RunRecord) -> Node:
    return Tree(render(run)).root


def section(page: Node, key: str) -> Node:
    return next(each for each in page.all("section") if each.attributes["id"] == key)


def bar_sums(node: Node, series: str) -> Counter[str]:
    """Values of one series of stacked bars, by kind."""
    sums: Counter[str] = Counter()
    for bar in node.all("g", series):
        for rect in bar.all("rect"):
            sums[rect.attributes["class"].removeprefix("fill-")] += int(rect.attributes["data-value"])
    return sums


def test_write_report_gives_both_files(tmp_path: Path, run: RunRecord) -> None:
    paths = write_report(run, tmp_path / "out")
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["report.html", "report.json"]
    assert read_json(paths.json) == run
    assert paths.html.read_text() == render(run)


def test_nothing_on_the_page_reaches_outside(run: RunRecord) -> None:
    source = render(run)
    assert not re.findall(r"(?:https?:)?//[\w.]+", source)
    assert not re.findall(r"(?i)<(?:link|img|iframe|object|embed|base)\b|@import|url\(|\b(?:src|href)=", source)
    assert "default-src 'none'" in source


def test_hostile_names_are_text(page: Node) -> None:
    assert page.all("script") == []
    assert page.all("b") == []
    assert HOSTILE in section(page, "by-trajectory").text()
    assert "<b>bold</b>" in section(page, "errors").text()
    assert [name for node in walk(page) for name in node.attributes if name.startswith("on")] == []


def walk(node: Node) -> list[Node]:
    return [node, *(each for child in node.children for each in walk(child))]


def test_hostile_model_trace_branch_and_memory_kind_are_text() -> None:
    hostile_call = call(HOSTILE, 0, branch=HOSTILE, limited_by=HOSTILE, finish_reason=HOSTILE)
    sample = MemorySample(t_s=0.0, bytes_by_kind={HOSTILE: 5}, live_sequences=1, checkpoints=0)
    record = RunRecord(
        model=HOSTILE,
        mode=HOSTILE,
        traces=(HOSTILE,),
        calls=(hostile_call,),
        memory=(sample,),
        policies=(synthetic_run.policy(HOSTILE, 5, 1),),
        counters={HOSTILE: 3},
    )
    root = Tree(render(record)).root
    assert root.all("script") == []
    assert root.text().count(HOSTILE) >= 8


def test_bars_add_up_to_the_record(page: Node, run: RunRecord) -> None:
    expected = {
        "reused": sum(each.resumed for each in run.calls),
        "gap": sum(each.gap for each in run.calls),
        "new": sum(each.new_tokens for each in run.calls),
        "generated": sum(each.generated for each in run.calls),
    }
    tokens = section(page, "tokens")
    assert bar_sums(tokens, "all") == expected
    assert bar_sums(tokens, "computed") == {kind: value for kind, value in expected.items() if kind != "reused"}


def test_bars_are_as_tall_as_their_values(page: Node) -> None:
    for series in section(page, "tokens").all("g", "series"):
        scale = float(series.attributes["data-scale"])
        base = float(series.all("line", "base")[0].attributes["y1"])
        for bar in series.all("g", "bar"):
            rects = bar.all("rect")
            for rect in rects:
                height = float(rect.attributes["height"])
                assert height == pytest.approx(float(rect.attributes["data-value"]) * scale, abs=0.011)
            foot = base
            for rect in rects:
                assert float(rect.attributes["y"]) + float(rect.attributes["height"]) == pytest.approx(foot, abs=0.02)
                foot = float(rect.attributes["y"])


def test_many_calls_share_bars_and_lose_none() -> None:
    calls = synthetic_run.trajectory_calls("long", 1500, 7)
    figure = svg_plots.tokens_by_call(calls, total("all", calls))
    node = Tree(str(figure.svg)).root
    assert len(node.all("g", "all")) <= svg_plots.MAX_BARS
    assert bar_sums(node, "all")["reused"] == sum(each.resumed for each in calls)
    assert len(str(figure.svg)) < 120_000


def test_single_call_trajectories_are_drawn_in_order_of_replay() -> None:
    calls = [call(f"request-{index}", 0, resumed=10 * index) for index in range(30)]
    figure = svg_plots.tokens_by_call(calls, total("all", calls))
    bars = Tree(str(figure.svg)).root.all("g", "all")
    assert len(bars) == 30
    assert "in order of replay" in str(figure.svg)


def test_tiles_show_the_key_numbers(page: Node, run: RunRecord) -> None:
    tiles = {
        tile.all("div", "tile-name")[0].text(): tile.all("div", "tile-value")[0].text()
        for tile in page.all("header")[0].all("div", "tile")
    }
    totals = total("all", run.calls)
    assert tiles["Calls"] == str(len(run.calls))
    reused = sum(each.resumed for each in run.calls) / sum(each.prompt_tokens for each in run.calls)
    assert tiles["Reused"] == f"{100 * reused:.1f} %"
    assert tiles["Prefill amplification"] == f"{totals.computed / totals.growth:.3f}×"
    assert tiles["Recurrent bytes copied"] == "0 B"
    assert tiles["KV bytes copied"] == "1.57 MB"
    assert tiles["Compiled programs"] == "9"
    assert totals.warm_ttft_s is not None
    assert tiles["Median TTFT, resumed"] == units.seconds(totals.warm_ttft_s)


def test_policies_show_every_result_and_both_sides(page: Node, run: RunRecord) -> None:
    policies = section(page, "policies")
    rows = [[cell.text() for cell in row.all("td")] for row in policies.all("tr")[1:]]
    assert [row[0] for row in rows] == [each.policy for each in run.policies]
    assert [row[2] for row in rows] == [f"{each.gap_tokens:,}" for each in run.policies]
    dots = [int(float(dot.attributes["data-value"])) for dot in policies.all("circle", "fill-gap")]
    assert dots == [each.gap_tokens for each in run.policies]
    sides = {node.attributes.get("id"): node for node in page.all("div", "tiles")}
    assert "31,000" in sides["without-response-end"].text()
    assert "1,450" in sides["with-response-end"].text()


def test_dots_lie_further_right_for_larger_gaps(page: Node, run: RunRecord) -> None:
    dots = section(page, "policies").all("circle", "fill-gap")
    by_place = sorted(zip([float(dot.attributes["cx"]) for dot in dots], run.policies, strict=True), key=lambda e: e[0])
    assert [each.gap_tokens for _, each in by_place] == sorted(each.gap_tokens for each in run.policies)


def test_gap_by_call_is_drawn_for_both_sides(page: Node, run: RunRecord) -> None:
    pair = response_end_pair(run.policies)
    assert pair is not None
    figure = section(page, "response-end")
    assert bar_sums(figure, "without")["without"] == sum(pair[0].gap_by_call)
    assert bar_sums(figure, "with")["with"] == sum(pair[1].gap_by_call)


def test_response_end_pair_needs_both() -> None:
    assert response_end_pair([synthetic_run.policy("prompt_end", 5, 1)]) is None
    names = ("grid 512", "prompt_end", "prompt_end_response-end")
    pair = response_end_pair([synthetic_run.policy(name, 5, 1) for name in names])
    assert pair is not None
    assert [each.policy for each in pair] == ["prompt_end", "prompt_end_response-end"]


def test_limits_name_the_first_differing_token(page: Node, run: RunRecord) -> None:
    rewritten = next(each for each in run.calls if each.differing)
    assert rewritten.differing is not None
    rows = {row.all("td")[0].text(): row.text() for row in section(page, "limits").all("tr")[1:]}
    position, expected, came = rewritten.differing
    assert f"call {rewritten.call + 1}: at token {position:,} expected {expected}, got {came}" in rows["template"]
    assert sum(row.calls for row in limits(run.calls)) == len(run.calls)
    assert "the chat template rendered an earlier response otherwise" in rows["template"]
    assert {"none", "cold", "recurrent", "template"} == set(rows)


def test_latency_marks_are_thinned_but_medians_are_not() -> None:
    calls = [call("a", index, resumed=100 + index, ttft_s=0.01 + index * 1e-6) for index in range(5000)]
    cold = [ColdSample(context_tokens=4000, cold_ttft_s=2.0, warm_ttft_s=0.02)]
    figure = svg_plots.latency(calls, cold)
    node = Tree(str(figure.svg)).root
    assert 600 <= len(node.all("circle", "mark")) <= svg_plots.MAX_POINTS
    assert len(node.all("path", "mark")) == 1
    assert "Thinned" in figure.note
    assert figure.title == "At 4k tokens the first token comes after 20 ms with reuse and 2 s without: 100× sooner"


def test_latency_leaves_out_what_was_too_quick_to_time() -> None:
    instant = ColdSample(context_tokens=9, cold_ttft_s=0.0, warm_ttft_s=0.0)
    assert svg_plots.latency([call("a", 0, ttft_s=0.0)], [instant]).svg is None
    assert (
        svg_plots.latency([call("a", 0, ttft_s=0.5)], [instant]).title == "Median time to first token: resumed 500 ms"
    )


def test_memory_keeps_its_peak_when_thinned() -> None:
    samples = [
        MemorySample(
            t_s=index / 10,
            bytes_by_kind={"recurrent": 9_000_000 if index == 1234 else 1_000_000, "latent": 500_000},
            live_sequences=3 if index == 1234 else 1,
            checkpoints=2,
        )
        for index in range(4000)
    ]
    figure = svg_timelines.memory(samples)
    assert figure.title == "State peaks at 9.5 MB, 94.7 % of it recurrent"
    assert "3 live sequences and 2 checkpoints" in figure.note
    assert len(str(figure.svg)) < 80_000


def test_memory_kinds_past_the_palette_share_one() -> None:
    kinds = {f"kind-{index}": 100 - index for index in range(11)}
    sample = MemorySample(t_s=1.0, bytes_by_kind=kinds, live_sequences=1, checkpoints=1)
    figure = svg_timelines.memory([sample])
    names = [meaning for _, meaning in figure.legend]
    assert names == ["other", *(f"kind-{index}" for index in reversed(range(6)))]
    assert f"other: at most {sum(100 - index for index in range(6, 11))} B" in str(figure.svg)


def test_branches_are_drawn_from_the_call_they_left() -> None:
    calls = synthetic_run.trajectory_calls("tree", 12, 3, sub_agents=2)
    figure = svg_timelines.branches(calls)
    node = Tree(str(figure.svg)).root
    hints = [fork.text().strip() for fork in node.all("path", "fork")]
    firsts = [next(each for each in calls if each.branch == name) for name in ("reader-0", "reader-1")]
    assert hints == [
        f"{each.branch} leaves call {each.parent + 1} at {each.resumed:,} tokens; "
        f"{each.gap:,} computed again, {each.new_tokens:,} new"
        for each in firsts
        if each.parent is not None
    ]
    assert figure.title.startswith("2 branches left a known path")
    assert len(node.all("g", "bar")) == len(calls)


def test_a_question_asked_again_is_a_fork_in_its_lane() -> None:
    calls = [call("again", index, parent=parent) for index, parent in enumerate((None, 0, 1, 0))]
    figure = svg_timelines.branches(calls)
    assert str(figure.svg).count('class="fork"') == 1
    assert figure.title.startswith("1 branch left")


def test_more_lanes_than_fit_are_counted() -> None:
    calls = [call("wide", 0)] + [call("wide", index, branch=f"agent-{index}", parent=0) for index in range(1, 31)]
    figure = svg_timelines.branches(calls)
    assert f"and {31 - svg_timelines.MAX_LANES} shorter branches" in str(figure.svg)


def test_growth_counts_what_no_one_had_seen() -> None:
    calls = [
        call("t", 0, resumed=0, gap=0, new_tokens=100, generated=20),
        call("t", 1, parent=0, resumed=100, gap=20, new_tokens=30, generated=10),
        call("t", 2, parent=1, resumed=60, gap=0, new_tokens=5, generated=1),
    ]
    totals = total("t", calls)
    assert totals.growth == 120 + 40 + 6
    assert totals.computed == 120 + 60 + 6
    assert totals.amplification == pytest.approx(186 / 166)


def test_growth_leaves_out_what_another_trajectory_had_brought() -> None:
    calls = [
        call("a", 0, resumed=0, gap=0, new_tokens=100, generated=20),
        call("a", 1, parent=0, resumed=120, gap=0, new_tokens=30, generated=10),
        call("b", 0, resumed=100, gap=0, new_tokens=0, generated=20),
        call("b", 1, parent=0, resumed=140, gap=10, new_tokens=0, generated=10),
    ]
    totals = total("all", calls)
    assert totals.growth == 120 + 40 + 20 + 10
    assert totals.amplification == pytest.approx((190 + 10) / 190)


def test_interrupted_is_said(run: RunRecord) -> None:
    stopped = msgspec.structs.replace(run, interrupted=True)
    assert "--resume" in Tree(render(stopped)).root.all("p", "warning")[0].text()
    assert "--resume" not in render(run)


def test_a_study_without_calls_shows_policies_only(run: RunRecord) -> None:
    study = RunRecord(model="none", mode="simulate", traces=("a.json",), policies=run.policies)
    root = Tree(render(study)).root
    assert [each.attributes["id"] for each in root.all("section")] == ["policies", "response-end"]


def test_an_empty_run_still_makes_a_page_and_a_table() -> None:
    empty = RunRecord(model="demo", mode="forced", traces=())
    assert "The policy study did not run." in render(empty)
    assert printed(empty).startswith("Policy study of 0 policies, no call replayed")


def test_long_tables_say_what_they_leave_out() -> None:
    calls = tuple(call(f"t-{index}", 0) for index in range(205))
    record = RunRecord(model="demo", mode="forced", traces=("x",), calls=calls)
    assert "200 of 205 trajectories; all are in report.json." in render(record)


def printed(record: RunRecord, width: int = 140) -> str:
    screen = io.StringIO()
    print_table(record, Console(width=width, file=screen))
    return screen.getvalue()


def test_terminal_table_has_the_numbers_and_no_markup(run: RunRecord) -> None:
    odd = msgspec.structs.replace(run, errors=tuple(f"f.jsonl:{n}: [red]x[/red]" for n in range(1, 13)))
    shown = printed(odd)
    assert HOSTILE in shown
    assert "[red]x[/red]" in shown
    assert "and 2 more skipped" in shown
    assert "31,000" in shown
    assert "+ response end" in shown
    assert "KV bytes copied" in shown


def test_terminal_codes_in_names_are_not_obeyed() -> None:
    record = RunRecord(model="demo", mode="forced", traces=("x",), calls=(call("\x1b[2Jgone\x07", 0),))
    assert "\ufffd[2Jgone\ufffd" in printed(record)
    assert "\x1b" not in printed(record)


@pytest.mark.parametrize("width", [80, 100])
def test_terminal_table_keeps_numbers_whole_when_narrow(run: RunRecord, width: int) -> None:
    shown = printed(run, width)
    assert max(len(line) for line in shown.splitlines()) <= width
    prompt = sum(each.prompt_tokens for each in run.calls if each.trajectory == HOSTILE)
    for cell in ("+ response end", "3,896,000", "1.054×", f"{prompt:,}"):
        assert cell in shown


def test_progress_prints_lines_where_there_is_no_terminal() -> None:
    now = [0.0]
    screen = io.StringIO()
    with Progress(6, Console(width=30, file=screen), done=2, every_s=10, clock=lambda: now[0]) as progress:
        for index in range(4):
            now[0] += 6.0
            progress.update(call("a", index))
            if index == 0:
                first = progress.status()
    assert first == "3/6 calls, 23.5 tok/s, 90.0 % reused, 0:18 left"
    assert screen.getvalue().splitlines() == [
        "4/6 calls, 23.5 tok/s, 90.0 % reused, 0:12 left",
        "6/6 calls, 23.5 tok/s, 90.0 % reused, took 0:24",
    ]


def test_progress_waits_for_no_call_that_was_skipped() -> None:
    screen = io.StringIO()
    with Progress(7, Console(file=screen, width=80), clock=lambda: 2.0) as progress:
        progress.update(call("a", 0))
        progress.skip()
        progress.skip(5)
    assert screen.getvalue().startswith("1/1 calls, 6 skipped, ")


def test_progress_draws_a_bar_on_a_terminal() -> None:
    screen = io.StringIO()
    with Progress(2, Console(file=screen, force_terminal=True, width=120)) as progress:
        progress.update(call("a", 0))
        progress.update(call("a", 1))
    assert "━" in screen.getvalue()
    assert "2/2 calls" in screen.getvalue()


def test_progress_leaves_a_line_when_interrupted() -> None:
    screen = io.StringIO()
    with contextlib.suppress(KeyboardInterrupt), Progress(9, Console(file=screen)) as progress:
        progress.update(call("a", 0))
        raise KeyboardInterrupt
    assert screen.getvalue().startswith("1/9 calls, ")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (units.compact(999.99), "1k"),
        (units.compact(1_234_567), "1.23M"),
        (units.compact(0), "0"),
        (units.byte_size(1_500_000), "1.5 MB"),
        (units.seconds(0.0123), "12.3 ms"),
        (units.seconds(4.2e-5), "42 µs"),
        (units.seconds(600), "10 min"),
        (units.share(1.0), "100 %"),
        (units.share(0.99999), "99.9 %"),
        (units.share(0.0001), "< 0.1 %"),
        (units.share(3.4), "340 %"),
        (units.share(37.5), "37.5×"),
        (units.factor(1.0342), "1.034×"),
        (units.plural(1, "branch"), "1 branch"),
        (units.plural(2, "branch"), "2 branches"),
        (units.plural(1200, "trajectory"), "1,200 trajectories"),
        (units.shorten("abcdefghij", 5), "ab…ij"),
    ],
)
def test_units(shown: str, expected: str) -> None:
    assert shown == expected


def test_ticks_are_round_and_inside() -> None:
    assert Scale(0, 95, 0, 1).ticks(5) == [0, 20, 40, 60, 80]
    assert Scale(1, 4_000_000, 0, 1, logarithmic=True).ticks(4) == [10.0**power for power in range(7)]
    assert Scale(0.02, 0.3, 0, 1, logarithmic=True).ticks(4) == [0.03, 0.1, 0.3]
    assert Scale(1, 100, 0, 10, logarithmic=True)(10) == pytest.approx(5)


def test_reporting_does_not_import_jax() -> None:
    code = (
        "import sys; import jaxhybrid.traces.report_html, jaxhybrid.traces.report_table, jaxhybrid.traces.progress; "
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

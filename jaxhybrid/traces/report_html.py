"""The run as one self-contained page: `report.html` beside the `report.json` it was made from. Nothing is fetched."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import jinja2

from jaxhybrid.traces import report_content, svg_plots, svg_timelines
from jaxhybrid.traces.record import RunRecord, write_atomically, write_json
from jaxhybrid.traces.summary import Totals, key_numbers, limits, response_end_pair


@dataclass(frozen=True)
class ReportPaths:
    """The two files of a finished report."""

    json: Path
    html: Path


def write_report(record: RunRecord, out_dir: Path) -> ReportPaths:
    """Writes `report.json` and `report.html` into `out_dir`, replacing earlier ones atomically."""
    page = render(record)
    paths = ReportPaths(json=out_dir / "report.json", html=out_dir / "report.html")
    write_json(record, paths.json)
    write_atomically(paths.html, page.encode())
    return paths


def render(record: RunRecord) -> str:
    """The page as text. Every name from a trace is escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    source = resources.files("jaxhybrid.traces").joinpath("report.html").read_text(encoding="utf-8")
    totals = key_numbers(record)
    return environment.from_string(source).render(
        record=record,
        headline=report_content.headline(record, totals),
        tiles=report_content.key_tiles(record, totals),
        figures=_figures(record, totals),
        pair=report_content.pair_tiles(record.policies),
        tables={
            "policies": report_content.policy_table(record.policies),
            "trajectories": report_content.trajectory_table(record.calls),
            "limits": report_content.limit_table(limits(record.calls)),
            "counters": report_content.counter_table(record.counters),
        },
        errors=record.errors[: report_content.MAX_ROWS],
    )


def _figures(record: RunRecord, totals: Totals) -> tuple[svg_plots.Figure, ...]:
    pair = response_end_pair(record.policies)
    study = [svg_plots.policies(record.policies), *([svg_plots.response_end(pair)] if pair else [])]
    if not record.calls:
        return tuple(study)
    return (
        svg_plots.tokens_by_call(record.calls, totals),
        *study,
        svg_plots.latency(record.calls, record.cold),
        svg_timelines.memory(record.memory),
        svg_timelines.branches(record.calls),
        svg_plots.tokens_by_trajectory(record.calls),
    )

"""The run on a terminal: key numbers, policies, what limited reuse, and the largest trajectories."""

from __future__ import annotations

from collections.abc import Sequence

import rich.box
import rich.table
from rich.console import Console
from rich.text import Text

from jaxhybrid.traces.record import RunRecord
from jaxhybrid.traces.report_content import (
    Table,
    Tile,
    headline,
    key_tiles,
    limit_table,
    policy_table,
    trajectory_table,
)
from jaxhybrid.traces.summary import key_numbers, limits

MAX_TRAJECTORIES = 12
MAX_ERRORS = 10
# What fits into 80 columns; the page has the rest.
POLICY_COLUMNS = ("policy", "gap", "gap a call", "amplification", "beyond perfect", "hit rate")
LIMIT_COLUMNS = ("limited by", "first difference", "calls", "gap", "new")
TRAJECTORY_COLUMNS = ("trajectory", "calls", "prompt", "reused", "gap", "amplification")


def print_table(record: RunRecord, console: Console) -> None:
    """Prints the summary. Names from traces are printed as text, never as markup or terminal codes."""
    totals = key_numbers(record)
    console.print(_text(headline(record, totals), style="bold"))
    if record.interrupted:
        console.print(_text("Interrupted: this covers the calls that were done; --resume goes on.", style="yellow"))
    tiles = key_tiles(record, totals)
    if tiles:
        console.print(_key_grid(tiles))
    if record.policies:
        policies = _select(policy_table(record.policies), POLICY_COLUMNS)
        console.print(_grid("Checkpoint policies on the same traces", policies))
    if record.calls:
        console.print(_grid("What limited reuse", _select(limit_table(limits(record.calls)), LIMIT_COLUMNS)))
        shown = trajectory_table(record.calls, MAX_TRAJECTORIES)
        title = f"Largest trajectories ({len(shown.rows)} of {shown.total_rows})"
        console.print(_grid(title, _select(shown, TRAJECTORY_COLUMNS)))
    for error in record.errors[:MAX_ERRORS]:
        console.print(_text(f"skipped {error}", style="red"))
    if len(record.errors) > MAX_ERRORS:
        console.print(_text(f"and {len(record.errors) - MAX_ERRORS} more skipped", style="red"))


def _key_grid(tiles: Sequence[Tile]) -> rich.table.Table:
    grid = rich.table.Table(box=rich.box.SIMPLE, show_header=False, pad_edge=False)
    grid.add_column()
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column()
    for tile in tiles:
        grid.add_row(_text(tile.name), _text(tile.value, style="bold"), _text(tile.detail, style="dim"))
    return grid


def _grid(title: str, data: Table) -> rich.table.Table:
    """Numbers stay whole; words fold where the terminal is narrow."""
    grid = rich.table.Table(
        title=title, title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD, pad_edge=False
    )
    for index, name in enumerate(data.header):
        words = index < data.text_columns
        header = name if words else name.replace(" ", "\n")
        grid.add_column(header, justify="left" if words else "right", overflow="fold", no_wrap=not words)
    for row in data.rows:
        grid.add_row(*(_text(cell) for cell in row))
    return grid


def _select(data: Table, names: Sequence[str]) -> Table:
    places = [data.header.index(name) for name in names]
    rows = tuple(tuple(row[place] for place in places) for row in data.rows)
    text_columns = sum(place < data.text_columns for place in places)
    return Table(tuple(names), rows, text_columns, data.total_rows)


def _text(content: str, style: str = "") -> Text:
    """Text that can't move the cursor: control characters are shown as replacement characters."""
    return Text("".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in content), style=style)

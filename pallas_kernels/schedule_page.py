"""The documents with the counts of `scripts/tpu_schedule.py`: a page for each part, and a summary of all parts."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

Row = Sequence[str]

HEADER = (
    "kernel", "model", "rows x tokens", "bundles a step", "steps", "bundles a token", "MXU", "VPU", "loads", "stores",
    "spills", "bytes / fewest", "issue, us", "memory, us", "MXU, us",
)  # fmt: skip
KEY = slice(0, 3)  # what tells rows apart
SPILLS, RATIO, ISSUE, MEMORY, MATRIX = (HEADER.index(name) for name in ("spills", "bytes / fewest", *HEADER[-3:]))


def table(rows: Iterable[Row], header: Row = HEADER) -> str:
    """Markdown."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, ["---"] * len(header), *rows))


def rows_of(page: str) -> list[Row]:
    """The rows of a page's table."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines[2:]]


def merged(old: Iterable[Row], new: Iterable[Row], order: Sequence[tuple[str, ...]]) -> list[Row]:
    """The new rows, and of the old those that they do not replace, in this order of keys. Others are left out."""
    by_key = {tuple(row[KEY]): row for row in (*old, *new)}
    return [by_key[key] for key in order if key in by_key]


def summary(parts: Mapping[str, Iterable[Row]]) -> str:
    """Two tables over all models and numbers of rows, the least and the greatest of each: issue by memory time, and of
    prefills the longest of the three times by the matrix unit's."""
    kernels: dict[str, dict[str, list[Row]]] = defaultdict(dict)
    for part, rows in parts.items():
        for row in rows:
            kernels[row[0]].setdefault(part, []).append(row)
    by_memory = [
        (
            kernel,
            _span(number(row[RATIO]) for rows in found.values() for row in rows),
            *(_span(_by_memory(row) for row in found.get(part, ())) for part in parts),
        )
        for kernel, found in kernels.items()
    ]
    by_matrix = [
        (kernel, *(_span(_by_matrix(row) for row in found.get(part, ())) for part in parts))
        for kernel, found in kernels.items()
        if kernel.endswith(" prefill") and any(number(row[MATRIX]) for rows in found.values() for row in rows)
    ]
    first = table(by_memory, ("issue / memory", "bytes / fewest", *parts))
    return f"{first}\n{table(by_matrix, ('longest / MXU', *parts))}"


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def _by_memory(row: Row) -> float:
    return number(row[ISSUE]) / max(number(row[MEMORY]), 0.05)


def _by_matrix(row: Row) -> float:
    return max(number(row[column]) for column in (ISSUE, MEMORY, MATRIX)) / max(number(row[MATRIX]), 0.05)


def _span(values: Iterable[float]) -> str:
    found = sorted(values)
    if not found:
        return "-"
    low, high = f"{found[0]:.2f}", f"{found[-1]:.2f}"
    return low if low == high else f"{low} to {high}"

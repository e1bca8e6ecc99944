"""The Grain pipeline: files and folders to records to trajectories to token ids, lazily and in one order.

Importing this module imports Grain, and with it jax. Everything it calls is host code without either.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grain

from jaxhybrid.errors import TraceError
from jaxhybrid.traces import units
from jaxhybrid.traces.files import find_files
from jaxhybrid.traces.recognise import read_file, reader_named
from jaxhybrid.traces.tokenise import Tokenizer, tokenise
from jaxhybrid.traces.trajectory import TokenTrajectory, Trajectory


@dataclass(frozen=True)
class Shard:
    """Part `index` of `count` of a sequence: every count-th element from the index-th."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise TraceError(f"expected a shard i/n with 0 <= i < n, got {self.index}/{self.count}")

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """From "i/n". Raises TraceError for anything else."""
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal()):
            raise TraceError(f"expected a shard i/n with 0 <= i < n, got {text!r}")
        return cls(int(index), int(count))


WHOLE = Shard(0, 1)


def read_traces(paths: Sequence[str | Path], *, format: str | None = None, shard: Shard = WHOLE) -> grain.IterDataset:
    """A Grain dataset of `Trajectory`, with a `TraceError` value, naming file and line, for each record that is broken.

    Files are read one after another, in the order of `find_files`, as elements are asked for. Trajectories keep the
    order of their file and have ids that are unique over all files. Every shard reads all files and keeps its own
    elements, so shards agree on order and ids. The dataset's iterators can be saved and restored (`get_state`).

    Raises TraceError at once for a missing path, no files, or an unknown `format`; and at the end of an iteration over
    files in which not one trajectory, of any shard, could be read.
    """
    if format is not None:
        reader_named(format)
    return _TraceDataset(find_files(paths), format, shard)


def tokenise_traces(
    traces: grain.IterDataset,
    tokenizer: Tokenizer,
    switches: Mapping[str, Any] | None = None,
    *,
    first_id: int = 0,
    seed: int = 0,
) -> grain.IterDataset:
    """A Grain dataset of `TokenTrajectory`, with the errors of `traces` and one for each that cannot be tokenised."""

    def convert(item: Trajectory | TraceError) -> TokenTrajectory | TraceError:
        if isinstance(item, TraceError):
            return item
        try:
            return tokenise(item, tokenizer, switches, first_id=first_id, seed=seed)
        except TraceError as error:
            return error

    return traces.map(convert)


class _TraceDataset(grain.IterDataset):
    def __init__(self, files: Sequence[Path], format: str | None, shard: Shard) -> None:
        super().__init__()
        self._files = files
        self._format = format
        self._shard = shard

    def __iter__(self) -> grain.DatasetIterator:
        return _TraceIterator(self._files, self._format, self._shard)

    def __str__(self) -> str:
        return f"TraceDataset({len(self._files)} files, shard {self._shard.index}/{self._shard.count})"


class _TraceIterator(grain.DatasetIterator):
    """Restored by reading again up to the element reached: reading is cheap beside replaying."""

    def __init__(self, files: Sequence[Path], format: str | None, shard: Shard) -> None:
        super().__init__()
        self._files = files
        self._format = format
        self._shard = shard
        self.set_state({"taken": 0})

    def __next__(self) -> Trajectory | TraceError:
        item = next(self._items)
        self._taken += 1
        return item

    def get_state(self) -> dict[str, Any]:
        return {"taken": self._taken}

    def set_state(self, state: dict[str, Any]) -> None:
        self._taken = state["taken"]
        self._items = self._shard_items()
        for _ in range(self._taken):
            next(self._items, None)

    def _shard_items(self) -> Iterator[Trajectory | TraceError]:
        seen: Counter[str] = Counter()
        errors: list[TraceError] = []
        items = (item for file in self._files for item in read_file(file, self._format))
        for position, item in enumerate(items):
            if isinstance(item, TraceError):
                errors.append(item)
            else:
                seen[item.id] += 1
                if seen[item.id] > 1:
                    item = replace(item, id=f"{item.id}#{seen[item.id]}")
            if position % self._shard.count == self._shard.index:
                yield item
        if not seen:
            found = f"no trajectory in {units.plural(len(self._files), 'file')}, {units.plural(len(errors), 'error')}"
            raise TraceError(f"{found}; the first: {errors[0]}" if errors else found)

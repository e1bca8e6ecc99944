"""Token ids for traces that record only block hashes: the same ids for the same content, everywhere and every time."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32, Int64, UInt64

from jaxhybrid.errors import TokenError
from jaxhybrid.traces.trajectory import BlockCall

_STEP = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: successive seeds of SplitMix64


def _mix(x: UInt64[np.ndarray, "..."]) -> UInt64[np.ndarray, "..."]:
    """SplitMix64's output function (Steele, Lea, Flood 2014): a bijection that scrambles 64-bit integers."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class TokenSource:
    """Ids drawn evenly from [first_id, vocab_size) without `excluded`, by name within a scope and a seed."""

    scope: str
    first_id: int
    vocab_size: int
    excluded: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self._choices < 1:
            raise TokenError(
                f"expected ids in [first_id, vocab_size), got [{self.first_id}, {self.vocab_size}) "
                f"without {len(self._holes)} of them"
            )

    @property
    def _holes(self) -> list[int]:
        return sorted({token for token in self.excluded if self.first_id <= token < self.vocab_size})

    @property
    def _choices(self) -> int:
        return self.vocab_size - self.first_id - len(self._holes)

    def draw(self, kind: str, names: Int64[np.ndarray, "n"], length: int) -> Int32[np.ndarray, "n*length"]:
        """`length` ids for each name. Names of different kinds have nothing to do with each other."""
        digest = hashlib.blake2b(f"{self.seed}/{kind}/{self.scope}".encode(), digest_size=8).digest()
        keys = _mix(names.astype(np.uint64) * _STEP + np.frombuffer(digest, dtype="<u8"))
        words = _mix(keys[:, None] + np.arange(1, length + 1, dtype=np.uint64) * _STEP)
        ids = (((words >> np.uint64(32)) * np.uint64(self._choices)) >> np.uint64(32)).astype(np.int32).ravel()
        ids += self.first_id
        for hole in self._holes:
            ids += ids >= hole
        return ids


def block_token_ids(
    calls: Sequence[BlockCall], source: TokenSource, owner: str
) -> list[tuple[Int32[np.ndarray, "prompt"], Int32[np.ndarray, "response"]]]:
    """Prompt and response of each call, consistent with every block that the trace names.

    A full block's ids follow from its name. What no name covers, the end of a prompt beyond its full blocks and the
    response, is taken from the first later call that extends this one, at the same positions: that call's prompt is
    this prompt, this response and new input. Where that call's prompt is too short to hold this response whole, the
    response was rewritten (its reasoning dropped, say) and gets ids of its own, drawn by `owner`, the trajectory's id;
    so does the response that nothing follows. Prompts that a later call extends are views of its array, so memory is
    that of the last prompt of each line.
    """
    extension = _extensions(calls)
    result: list[tuple[np.ndarray, np.ndarray]] = [(np.empty(0, np.int32),) * 2] * len(calls)
    for index in reversed(range(len(calls))):
        call, later = calls[index], extension[index]
        begin, end = call.input_length, call.input_length + call.output_length
        prompt = _own_prompt(call, source) if later is None else result[later][0][:begin]
        if later is not None and calls[later].input_length >= end:
            response = result[later][0][begin:end]
        else:
            response = source.draw(f"response/{owner}", np.array([index]), call.output_length)
        prompt.flags.writeable = response.flags.writeable = False
        result[index] = prompt, response
    return result


def _extensions(calls: Sequence[BlockCall]) -> list[int | None]:
    """For each call the first later one that it is the parent of and that begins with its whole prompt, or None."""
    extension: list[int | None] = [None] * len(calls)
    for index, call in enumerate(calls):
        if call.parent is not None and extension[call.parent] is None and _extends(call, calls[call.parent]):
            extension[call.parent] = index
    return extension


def _extends(call: BlockCall, earlier: BlockCall) -> bool:
    """Whether `call`'s prompt may begin with all of `earlier`'s, as far as names tell.

    The name of a partly filled block says nothing about a longer prompt, where the same block goes on.
    """
    known = min(earlier.input_length // earlier.block_size, len(earlier.blocks))
    if call.input_length == earlier.input_length:
        known = len(earlier.blocks)
    return (
        call.input_length >= earlier.input_length
        and call.block_size == earlier.block_size
        and np.array_equal(call.blocks[:known], earlier.blocks[:known])
    )


def _own_prompt(call: BlockCall, source: TokenSource) -> Int32[np.ndarray, "prompt"]:
    full = min(call.input_length // call.block_size, len(call.blocks))
    ids = source.draw("block", call.blocks[:full], call.block_size)
    rest = call.input_length - len(ids)
    if rest == 0:
        return ids
    # A partly filled block by its own name; one that the trace does not name, by the block before it.
    kind = "part" if len(call.blocks) > full else "after"
    name = call.blocks[-1:] if len(call.blocks) else np.zeros(1, np.int64)
    return np.concatenate([ids, source.draw(kind, name, rest)])

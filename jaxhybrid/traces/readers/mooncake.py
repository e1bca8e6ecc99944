"""Requests of a chat service as block hashes, without text (the Mooncake traces).

JSON lines, one request each:
  {"timestamp": milliseconds, "input_length": tokens, "output_length": tokens, "hash_ids": [int, ...]}
`hash_ids` name the prompt's blocks of 512 tokens, the partly filled last one included: ceil(input_length / 512).

Requests carry no session. A request joins the trajectory of the earlier request with which it shares the longest run of
blocks (the latest of equals), if that run is longer than one block: the first block is a system prompt that nearly all
requests share. Trajectories come in order of their first request. Hashes are compared within the file.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from jaxhybrid.errors import TraceError
from jaxhybrid.traces.files import Record, read_entries
from jaxhybrid.traces.lineage import PrefixTrie, with_parents
from jaxhybrid.traces.readers.weka import HashId, block_call
from jaxhybrid.traces.trajectory import BlockCall, Trajectory

FORMAT = "mooncake"
BLOCK_SIZE = 512
SYSTEM_PROMPT_BLOCKS = 1


class _Row(msgspec.Struct):
    timestamp: float | None
    input_length: int
    output_length: int | None
    hash_ids: list[HashId]


def recognises(value: Any) -> bool:
    return isinstance(value, dict) and {"hash_ids", "input_length", "output_length"} <= value.keys()


def read(records: Iterable[Record]) -> Iterator[Trajectory | TraceError]:
    trie = PrefixTrie()
    conversations: list[list[BlockCall]] = []
    sources: list[Record] = []
    for record in read_entries(records):
        try:
            call = _call(record)
        except TraceError as error:
            yield error
            continue
        path = call.blocks.tolist()
        depth, conversation = trie.deepest(path)
        if conversation is None or depth <= SYSTEM_PROMPT_BLOCKS:
            conversation = len(conversations)
            conversations.append([])
            sources.append(record)
        conversations[conversation].append(call)
        trie.insert(path, conversation)
    for calls, record in zip(conversations, sources, strict=True):
        yield Trajectory(record.name, record.source, FORMAT, with_parents(calls), f"mooncake/{record.file.name}")


def _call(record: Record) -> BlockCall:
    row = record.convert(_Row)
    blocks = -(-row.input_length // BLOCK_SIZE)
    if len(row.hash_ids) != blocks:
        raise TraceError(
            f"{record.source}: expected {blocks} hashes for {row.input_length} tokens in blocks of {BLOCK_SIZE}, "
            f"got {len(row.hash_ids)}"
        )
    return block_call(
        row.hash_ids,
        BLOCK_SIZE,
        row.input_length,
        row.output_length or 0,
        record.source,
        timestamp_s=None if row.timestamp is None else row.timestamp / 1e3,
    )

"""Kimi's tokenizer: `tiktoken.model`, which Kimi Linear, K2 and K3 publish in place of a tokenizer.json.

The file holds a token a line, in base64, and its rank: ids and merge priorities in one. After the last rank come 256
control tokens. Those that `tokenizer_config.json` names have these names, the others `<|reserved_token_ID|>`.
"""

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tiktoken

from jaxhybrid.errors import TokenError
from jaxhybrid.text_tokenizer import TOKENIZER_CONFIG, declared_tokens

TIKTOKEN_MODEL = "tiktoken.model"
CONTROL_TOKENS = 256
# What tokens are made within: runs of Han characters, then words, cut where lower case ends, with a character before
# them and an English contraction after; digits by threes; punctuation; white space.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE, _AFTER = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{_AFTER}",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{_AFTER}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
# The published tokenizer cuts long text there first, which shows in its ids.
MAX_CHARACTERS = 400_000
MAX_RUN = 25_000
_RUN = re.compile(r"\s+|\S+")


class TiktokenTokenizer:
    """Ranked tokens and control tokens. Immutable."""

    def __init__(self, ranks: Mapping[bytes, int], controls: Mapping[str, int]) -> None:
        """`ranks`: 0 to n - 1, with all 256 bytes among the tokens. `controls`: ids from n on."""
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=PATTERN, mergeable_ranks=dict(ranks), special_tokens=dict(controls)
        )
        self._controls = dict(controls)
        self._control = re.compile("(" + "|".join(map(re.escape, sorted(controls, key=len, reverse=True))) + ")")
        self.control_ids = frozenset(controls.values())
        self.ids = frozenset(ranks.values()) | self.control_ids

    @classmethod
    def from_bytes(cls, content: bytes, settings: Mapping[str, Any], folder: Path) -> "TiktokenTokenizer":
        """Reads the content of `tiktoken.model`, and control tokens that `settings`, the tokenizer_config.json, names.

        Raises TokenError: for the model with the line, for a control token with its id.
        """
        ranks = _read_ranks(content, folder / TIKTOKEN_MODEL)
        return cls(ranks, _control_tokens(len(ranks), settings, folder))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for number, part in enumerate(self._control.split(text)):
            ids += [self._controls[part]] if number % 2 else self.encode_ordinary(part)
        return ids

    def encode_ordinary(self, text: str) -> list[int]:
        text.encode()  # tiktoken would replace what is no Unicode
        return [token_id for piece in _pieces(text) for token_id in self._encoding.encode_ordinary(piece)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._encoding.decode(list(token_ids))

    def token_to_id(self, token: str) -> int | None:
        if token in self._controls:
            return self._controls[token]
        try:
            return self._encoding.encode_single_token(token)
        except KeyError:
            return None


def _pieces(text: str) -> Iterator[str]:
    """The text in pieces of at most MAX_CHARACTERS, cut within runs of MAX_RUN white space or other characters."""
    for start in range(0, len(text), MAX_CHARACTERS):
        part, begun = text[start : start + MAX_CHARACTERS], 0
        if len(part) > MAX_RUN:
            for run in _RUN.finditer(part):
                for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                    yield part[begun:cut]
                    begun = cut
        yield part[begun:]


def _read_ranks(content: bytes, file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    seen: set[int] = set()
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            encoded, digits = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(digits)
        except ValueError as error:
            raise TokenError(f"{file}: line {number}: expected a base64 token and a rank, got {line!r:.80}") from error
        if token in ranks or rank in seen:
            raise TokenError(f"{file}: line {number}: expected a token and a rank not seen before, got {line!r:.80}")
        ranks[token] = rank
        seen.add(rank)
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise TokenError(f"{file}: expected a token for each byte, found none for {missing[:8]} of {len(ranks)} tokens")
    if seen != set(range(len(ranks))):
        raise TokenError(f"{file}: expected ranks 0 to {len(ranks) - 1}, found {min(seen)} to {max(seen)}")
    return ranks


def _control_tokens(first: int, settings: Mapping[str, Any], folder: Path) -> dict[str, int]:
    """name -> id of the tokens after the ranked ones: 256, or more if more are declared."""
    names = {token_id: token["content"] for token_id, token in declared_tokens(settings, folder).items()}
    end = max(first + CONTROL_TOKENS, *(token_id + 1 for token_id in names)) if names else first + CONTROL_TOKENS
    controls: dict[str, int] = {}
    for token_id in sorted({*range(first, end), *names}):
        name = names.get(token_id, f"<|reserved_token_{token_id}|>")
        if token_id < first or not name or name in controls:
            raise TokenError(
                f"{folder / TOKENIZER_CONFIG}: added_tokens_decoder: expected names of their own for ids from {first} "
                f"on, got {name!r} for {token_id}"
            )
        controls[name] = token_id
    return controls

"""What chat needs of a tokenizer, and `tokenizer.json` through the library `tokenizers`."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from tokenizers import AddedToken, Tokenizer

from jaxhybrid.errors import TokenError

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"


class TextTokenizer(Protocol):
    """Text to ids and back. Control tokens are those that no text is merged into: `<|im_end|>` and their like."""

    @property
    def ids(self) -> frozenset[int]:
        """All ids of the vocabulary."""
        ...

    @property
    def control_ids(self) -> frozenset[int]:
        """The ids of control tokens."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of the text; the text of a control token becomes that token. Raises UnicodeEncodeError, TypeError."""
        ...

    def encode_ordinary(self, text: str) -> list[int]:
        """Ids of the text, the names of control tokens spelt out as any other text. Raises as `encode` does."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of known ids, control tokens included."""
        ...

    def token_to_id(self, token: str) -> int | None:
        """The id of a control token, or of any token whose text this is; None if there is none."""
        ...


class JsonTokenizer:
    """A `tokenizer.json`. Immutable."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.ids = frozenset(tokenizer.get_vocab(with_added_tokens=True).values())
        added = tokenizer.get_added_tokens_decoder()
        self.control_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @classmethod
    def from_bytes(cls, content: bytes, settings: Mapping[str, Any], folder: Path) -> "JsonTokenizer":
        """Reads the file's content, and tokens that `settings`, the tokenizer_config.json, adds. Raises TokenError."""
        try:
            tokenizer = Tokenizer.from_buffer(content)
        except Exception as error:  # the tokenizers library raises bare Exceptions
            raise TokenError(f"{folder / TOKENIZER_JSON}: not a tokenizer: {error}") from error
        _add_missing_tokens(tokenizer, settings, folder)
        return cls(tokenizer)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_ordinary(self, text: str) -> list[int]:
        return self._spelling_out.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def token_to_id(self, token: str) -> int | None:
        return self._tokenizer.token_to_id(token)

    @cached_property
    def _spelling_out(self) -> Tokenizer:
        copy = Tokenizer.from_str(self._tokenizer.to_str())
        copy.encode_special_tokens = True
        return copy


def declared_tokens(settings: Mapping[str, Any], folder: Path) -> dict[int, dict[str, Any]]:
    """id -> token of `added_tokens_decoder`, in order of ids. Raises TokenError where that is something else."""
    where = f"{folder / TOKENIZER_CONFIG}: added_tokens_decoder"
    declared = settings.get("added_tokens_decoder", {})
    try:
        tokens = {int(token_id): dict(token) for token_id, token in declared.items()}
        if not all(isinstance(token["content"], str) for token in tokens.values()):
            raise TypeError("a token's content is not text")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenError(f"{where}: expected ids with tokens, each with its content, got {declared!r:.80}") from error
    return dict(sorted(tokens.items()))


def _add_missing_tokens(tokenizer: Tokenizer, settings: Mapping[str, Any], folder: Path) -> None:
    """Some checkpoints declare added tokens in the settings only."""
    present = tokenizer.get_added_tokens_decoder()
    for token_id, token in declared_tokens(settings, folder).items():
        if token_id in present:
            continue
        flags = {name: token.get(name, False) for name in ("single_word", "lstrip", "rstrip", "special")}
        tokenizer.add_tokens([AddedToken(token["content"], normalized=token.get("normalized", True), **flags)])
        if tokenizer.token_to_id(token["content"]) != token_id:
            raise TokenError(
                f"{folder / TOKENIZER_CONFIG}: expected {token['content']!r} to have id {token_id}, "
                f"got {tokenizer.token_to_id(token['content'])}"
            )

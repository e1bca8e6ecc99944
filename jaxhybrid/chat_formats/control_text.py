"""Text in which control tokens are told from the same characters in a message.

The marks are lone surrogates, which no Unicode text has: what a user writes cannot hold one.
"""

import re
from collections.abc import Iterator

from jaxhybrid.errors import TokenError

_CONTROL = "\ud800"  # before and after the name of a control token
_CUT = "\ud801"  # no token lies on both sides
_PIECE = re.compile(f"{_CONTROL}([^{_CONTROL}]*){_CONTROL}|([^{_CONTROL}{_CUT}]+)")
_SURROGATE = re.compile("[\ud800-\udfff]")


def control(token: str) -> str:
    """A control token, by its name."""
    return f"{_CONTROL}{token}{_CONTROL}"


def literal(text: str) -> str:
    """Text encoded on its own, with no control token in it. Raises TokenError where it is no Unicode."""
    found = _SURROGATE.search(text)
    if found:
        raise TokenError(f"expected Unicode text, got the lone surrogate {found[0]!r} at character {found.start()}")
    return text + _CUT if text else ""


def pieces(marked: str) -> Iterator[tuple[str, bool]]:
    """(text, whether it is a control token) of marked text, in order."""
    for piece in _PIECE.finditer(marked):
        yield (piece[2], False) if piece[2] else (piece[1], True)


def unmarked(marked: str) -> str:
    """The text without its marks."""
    return _SURROGATE.sub("", marked)

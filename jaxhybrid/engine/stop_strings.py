"""Where a generated text reached a stop string, in tokens."""

from collections.abc import Callable, Sequence


def kept_tokens(made: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> int | None:
    """How many of the tokens lie wholly before the earliest stop string; None if none was reached."""
    text = decode(made)
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    if not found:
        return None
    low, high = 0, len(made)
    while low < high:  # the text of a prefix grows with the prefix
        middle = (low + high + 1) // 2
        if len(decode(made[:middle])) <= min(found):
            low = middle
        else:
            high = middle - 1
    return low

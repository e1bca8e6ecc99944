"""DeepSeek-V4's compressed attention: tokens pooled into entries, and attention over a window and entries."""

from jaxtyping import Array, Float, Int

from pallas_kernels import registry
from pallas_kernels.compressed_attention import reference, xla
from pallas_kernels.partition import Axes

POOL_WINDOWS = registry.Operator(
    "pool_windows",
    (
        registry.Implementation("xla", xla.pool_windows),
        registry.Implementation("reference", reference.pool_windows, automatic=False),
    ),
    Axes(arguments=(), results=("", "", "")),
)

COMPRESSED_ATTENTION = registry.Operator(
    "compressed_attention",
    (
        registry.Implementation("xla", xla.compressed_attention),
        registry.Implementation("reference", reference.compressed_attention, automatic=False),
    ),
    Axes(arguments=("_ _ heads", "", "heads"), results=("_ _ heads", "", "")),
)


def pool_windows(
    values: Float[Array, "B T S d"],
    gates: Float[Array, "B T S d"],
    position_bias: Float[Array, "m S d"],
    state: Float[Array, "L N R 3 d"],
    layer: int | Int[Array, ""],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
) -> tuple[Float[Array, "B W d"], Int[Array, " B"], Float[Array, "L N R 3 d"]]:
    """Pool every m tokens into one entry, channel by channel, by the softmax of their gates.

    DeepSeek-V4 (arXiv:2606.19348), section 2.3. With one series (S = 1, equations 20 to 23), entry w is the mean of the
    values of tokens w m .. w m + m - 1, weighted by softmax(gate + position_bias). With two (S = 2, equations 9 to 12),
    the softmax is over the first series of window w - 1 and the second of window w together; window 0 has the latter
    alone. A window that has not closed is in the state as running sums, so the state does not grow with m.

    Args:
      values, gates: of T new tokens. Padding may hold anything, NaN included.
      position_bias: added to the gate of the window's j-th token.
      state: in float32, R = 1 or, with two series, 3 rows of maximum, sum of exponentials, weighted sum: this window's
        by series, then the last window's first series. All zeros before the first token.
      layer: which of the L layers, a Python int or a traced scalar.
      read_slots, write_slots: where each row's state is read and goes; padding rows share slot 0.
      starts: tokens of each sequence before these.
      lengths: how many of the T are real.

    Returns:
      The entries that these tokens closed, in float32: of windows starts // m onwards, the first count[b] of the
      W = (T + m - 2) // m + 1 real and the others finite; count; the updated state.
    """
    arguments = (values, gates, position_bias, state, layer, read_slots, write_slots, starts, lengths)
    return registry.choose(POOL_WINDOWS, *arguments)(*arguments)


def compressed_attention(
    q: Float[Array, "B T H d"],
    kv: Float[Array, "B T d"],
    sinks: Float[Array, " H"],
    window: Float[Array, "L N w-1 d"],
    entries: Float[Array, "L P page d"] | None,
    chosen: Int[Array, "B T K"] | None,
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B W"],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    read_slots: Int[Array, " B"],
    write_slots: Int[Array, " B"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T H d"], Float[Array, "L N w-1 d"], Float[Array, "L P page d"] | None]:
    """One softmax over the last w tokens, the chosen entries and a sink, where a key is also its value.

    DeepSeek-V4 (arXiv:2606.19348), section 2.3. All heads share the keys; a head's sink takes part in the denominator
    only.

    Args:
      q: queries, rotated.
      kv: the new tokens' keys, rotated. Padding may hold anything, NaN included.
      sinks: a score for each head.
      window: each slot's last w - 1 keys, oldest first.
      entries: pages of pooled entries, written already, or None for the window alone.
      chosen: the entries that each query sees: indices in any order, then -1.
      layer: which of the L layers, a Python int or a traced scalar.
      page_table: page ids by entry // page, where a page counts entries.
      starts: tokens of each sequence before these.
      lengths: how many of the T are real; the rest change nothing, and their output is unspecified but finite.
      read_slots, write_slots: where each row's window is read and goes; padding rows share slot 0.
      scale: factor on the scores.

    Returns:
      Output in q's dtype, computed in float32, the updated window, and the entries as given, to go on with.
    """
    arguments = (
        q, kv, sinks, window, entries, chosen, layer, page_table, starts, lengths, read_slots, write_slots,
    )  # fmt: skip
    return registry.choose(COMPRESSED_ATTENTION, *arguments, scale=scale)(*arguments, scale=scale)

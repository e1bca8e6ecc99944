"""Multi-head, grouped-query and multi-query attention over paged keys and values."""

from jaxtyping import Array, Float, Int

from pallas_kernels import registry
from pallas_kernels.paged_attention import gpu, reference, tpu, xla
from pallas_kernels.partition import Axes

OPERATOR = registry.Operator(
    "paged_attention",
    (
        registry.Implementation("pallas", tpu.paged_attention, platforms=("tpu",), accepts=tpu.accepts),
        registry.Implementation("pallas", gpu.paged_attention, platforms=("gpu",), accepts=gpu.accepts),
        registry.Implementation("xla", xla.paged_attention),
        registry.Implementation("reference", reference.paged_attention, automatic=False),
    ),
    Axes(
        arguments=("_ _ heads", "_ _ heads", "_ _ heads", "_ _ _ heads", "_ _ _ heads"),
        results=("_ _ heads", "_ _ _ heads", "_ _ _ heads"),
        options={"sinks": "heads"},
    ),
)


def paged_attention(
    q: Float[Array, "B T Hq d"],
    k: Float[Array, "B T Hkv d"],
    v: Float[Array, "B T Hkv dv"],
    k_pages: Float[Array, "L P page Hkv*d"],
    v_pages: Float[Array, "L P page Hkv*dv"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B W"],
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    *,
    scale: float,
    max_length: int | None = None,
    window: int | None = None,
    sinks: Float[Array, " Hq"] | None = None,
    soft_cap: float | None = None,
) -> tuple[Float[Array, "B T Hq dv"], Float[Array, "L P page Hkv*d"], Float[Array, "L P page Hkv*dv"]]:
    """Write T new tokens of each sequence into its pages, then attend causally over all that it has.

    Grouped-query attention (Ainslie et al. 2023): query head h uses key head h // (Hq // Hkv);
    out_t = sum_s softmax_s(scale * q_t . k_s) v_s over positions s <= t.

    Args:
      q, k, v: queries, keys and values of the new tokens, already rotated; any float dtype.
      k_pages, v_pages: all layers' pages, the heads of a token side by side in one row; donate them and keep what comes
        back. Page 0 is null and is never read.
      layer: which of the L layers, a Python int or a traced scalar.
      page_table: page ids by position // page, 0 past a sequence's end. Must cover starts + lengths.
      starts: tokens that each sequence already has in its pages.
      lengths: how many of the T steps are real; the rest write nothing and their output is 0.
      scale: factor on the scores, d ** -0.5 as a rule.
      max_length: static upper bound of starts + lengths. Without it the time follows the longest sequence; with it the
        operator is reverse-differentiable and always works through max_length positions.
      window: how many positions a query sees, its own included: t - window < s <= t. Blocks before a sequence's window
        are never read, so time follows the window. None: all of them.
      sinks: a logit per query head that joins the softmax's denominator and has no value (gpt-oss, arXiv 2508.10925).
      soft_cap: scores become soft_cap * tanh(score / soft_cap) (Gemma 2, arXiv 2408.00118).

    Returns:
      Output in q's dtype, computed in float32, and the two updated page arrays.
    """
    arguments = (q, k, v, k_pages, v_pages, layer, page_table, starts, lengths)
    options = {"scale": scale, "max_length": max_length, "window": window, "sinks": sinks, "soft_cap": soft_cap}
    run = registry.choose(OPERATOR, *arguments, **options)
    return run(*arguments, **options)

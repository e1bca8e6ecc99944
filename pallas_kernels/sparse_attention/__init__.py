"""DeepSeek sparse attention (DSA): which keys a query attends to, and latent attention over those alone."""

from jaxtyping import Array, Float, Int

from pallas_kernels import registry
from pallas_kernels.partition import Axes
from pallas_kernels.sparse_attention import gpu, reference, tpu_attend, tpu_index, xla

INDEX_TOP_K = registry.Operator(
    "index_top_k",
    (
        registry.Implementation("pallas", tpu_index.index_top_k, platforms=("tpu",), accepts=tpu_index.accepts),
        registry.Implementation("pallas", gpu.index_top_k, platforms=("gpu",), accepts=gpu.accepts_index),
        registry.Implementation("xla", xla.index_top_k),
        registry.Implementation("reference", reference.index_top_k, automatic=False),
    ),
    Axes(arguments=(), results=("", "")),
)

SPARSE_LATENT_ATTENTION = registry.Operator(
    "sparse_latent_attention",
    (
        registry.Implementation(
            "pallas", tpu_attend.sparse_latent_attention, platforms=("tpu",), accepts=tpu_attend.accepts
        ),
        registry.Implementation("pallas", gpu.sparse_latent_attention, platforms=("gpu",), accepts=gpu.accepts),
        registry.Implementation("xla", xla.sparse_latent_attention),
        registry.Implementation("reference", reference.sparse_latent_attention, automatic=False),
    ),
    Axes(arguments=("_ _ heads", "_ _ heads", "", "", "heads", "heads"), results=("_ _ heads", "")),
)


def index_top_k(
    index_q: Float[Array, "B T HI dI"],
    index_weights: Float[Array, "B T HI"],
    pages: Float[Array, "L P page dI"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B W"],
    seen: Int[Array, "B T"],
    *,
    top_k: int,
    max_length: int | None = None,
) -> tuple[Int[Array, "B T K"], Float[Array, "L P page dI"]]:
    """The lightning indexer: the top_k keys of each query by sum_h weight_h relu(q_h . k).

    DeepSeek-V3.2-Exp (report, equation 1). Factors common to all keys change no choice and may be left out. Of equal
    scores the earlier key wins.

    Args:
      index_q: queries of the HI index heads, rotated.
      index_weights: a weight for each of them, of either sign.
      pages: all layers' index keys, written already up to max(seen[b]). Page 0 is null and is never read.
      layer: which of the L layers, a Python int or a traced scalar.
      page_table: page ids by position // page, 0 past a sequence's end.
      seen: how many keys each query sees: start + t + 1 for one key a token, 0 for a padded step.
      top_k: how many to choose at the most.
      max_length: static upper bound of `seen`. Without it the time follows the longest sequence.

    Returns:
      Positions of the chosen keys, int32, then -1; K = min(top_k, W * page). Best first, but for the TPU kernel, whose
      positions ascend. No gradient passes. And the pages as given, for the caller to go on with.
    """
    arguments = (index_q, index_weights, pages, layer, page_table, seen)
    run = registry.choose(INDEX_TOP_K, *arguments, top_k=top_k, max_length=max_length)
    return run(*arguments, top_k=top_k, max_length=max_length)


def sparse_latent_attention(
    q_nope: Float[Array, "B T H dn"],
    q_rope: Float[Array, "B T H dr"],
    latent: Float[Array, "B T r"],
    k_rope: Float[Array, "B T dr"],
    w_k: Float[Array, "H dn r"],
    w_v: Float[Array, "H dv r"],
    pages: Float[Array, "L P page r+dr"],
    chosen: Int[Array, "B T K"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B W"],
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    *,
    scale: float,
    max_length: int | None = None,
) -> tuple[Float[Array, "B T H dv"], Float[Array, "L P page r+dr"]]:
    """Write T new latents of each sequence into its pages, then attend over the chosen positions of each query.

    As `latent_attention`, with the softmax over `chosen[b, t]` alone: distinct positions no later than starts[b] + t,
    in any order, then -1 (as `index_top_k` returns them, for this layer or one before it). With all positions chosen
    the two are equal. The other arguments and the result are those of `latent_attention`.
    """
    arguments = (q_nope, q_rope, latent, k_rope, w_k, w_v, pages, chosen, layer, page_table, starts, lengths)
    run = registry.choose(SPARSE_LATENT_ATTENTION, *arguments, scale=scale, max_length=max_length)
    return run(*arguments, scale=scale, max_length=max_length)

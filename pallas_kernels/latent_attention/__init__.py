"""Multi-head latent attention (MLA) over paged latents."""

from jaxtyping import Array, Float, Int

from pallas_kernels import registry
from pallas_kernels.latent_attention import gpu, reference, tpu, xla
from pallas_kernels.partition import Axes

OPERATOR = registry.Operator(
    "latent_attention",
    (
        registry.Implementation("pallas", tpu.latent_attention, platforms=("tpu",), accepts=tpu.accepts),
        registry.Implementation("pallas", gpu.latent_attention, platforms=("gpu",), accepts=gpu.accepts),
        registry.Implementation("xla", xla.latent_attention),
        registry.Implementation("reference", reference.latent_attention, automatic=False),
    ),
    Axes(
        arguments=("_ _ heads", "_ _ heads", "", "", "heads", "heads"),
        results=("_ _ heads", ""),
    ),
)


def latent_attention(
    q_nope: Float[Array, "B T H dn"],
    q_rope: Float[Array, "B T H dr"],
    latent: Float[Array, "B T r"],
    k_rope: Float[Array, "B T dr"],
    w_k: Float[Array, "H dn r"],
    w_v: Float[Array, "H dv r"],
    pages: Float[Array, "L P page r+dr"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B W"],
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    *,
    scale: float,
    max_length: int | None = None,
) -> tuple[Float[Array, "B T H dv"], Float[Array, "L P page r+dr"]]:
    """Write T new latents of each sequence into its pages, then attend causally over all that it has.

    DeepSeek-V2 (arXiv:2405.04434), section 2.1: with c_s the normalised latent of position s and k_s its rope key, one
    for all heads, score = scale * (q_nope . (w_k c_s) + q_rope . k_s) and out = w_v sum_s softmax_s(score) c_s.

    Args:
      q_nope, q_rope: the two parts of the queries; q_rope already rotated (or not, where the model has no positions).
      latent, k_rope: the new tokens' normalised latents and rope keys, rotated likewise.
      w_k, w_v: a head's key and value rows of `kv_b_proj`, [out, in].
      pages: all layers' pages, each row latent | rope key; donate them and keep what comes back. Page 0 is null and is
        never read.
      layer: which of the L layers, a Python int or a traced scalar.
      page_table: page ids by position // page, 0 past a sequence's end. Must cover starts + lengths.
      starts: tokens that each sequence already has in its pages.
      lengths: how many of the T steps are real; the rest write nothing and their output is 0.
      scale: factor on the scores, (dn + dr) ** -0.5 times YaRN's as a rule.
      max_length: static upper bound of starts + lengths. Without it the time follows the longest sequence; with it the
        operator is reverse-differentiable and always works through max_length positions.

    Returns:
      Output in q_nope's dtype, computed in float32, and the updated pages.
    """
    arguments = (q_nope, q_rope, latent, k_rope, w_k, w_v, pages, layer, page_table, starts, lengths)
    run = registry.choose(OPERATOR, *arguments, scale=scale, max_length=max_length)
    return run(*arguments, scale=scale, max_length=max_length)

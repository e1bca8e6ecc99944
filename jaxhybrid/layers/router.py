"""Which experts a token goes to, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxhybrid.config import MoeSpec


def route(
    scores: Float[Array, "N E"],
    correction_bias: Float[Array, " E"] | None,
    spec: MoeSpec,
    fixed: Int[Array, "N k"] | None = None,
) -> tuple[Int[Array, "N k"], Float[Array, "N k"]]:
    """Expert ids and weights per token.

    `softmax`: the k largest probabilities (Qwen3-MoE), within the `topk_group` groups of the most probable experts
    (DeepSeek-V2, arXiv 2405.04434, section 2.2.2). `sigmoid`: chosen by sigmoid(score) + correction bias within the
    best `topk_group` groups, weighted by the sigmoid alone (DeepSeek-V3, arXiv 2412.19437, equations 12 to 16).
    `sqrtsoftplus`: likewise, by the root of a softplus (DeepSeek-V4, 2606.19348). `fixed`: the choice, already made.
    """
    if spec.scoring == "softmax":
        gates = jax.nn.softmax(scores, axis=-1)
        choice = _within_best_groups(gates, spec, best=1)
    else:
        gates = jax.nn.sigmoid(scores) if spec.scoring == "sigmoid" else jnp.sqrt(jax.nn.softplus(scores))
        choice = _within_best_groups(gates if correction_bias is None else gates + correction_bias, spec, best=2)
    experts = jax.lax.top_k(choice, spec.num_experts_per_tok)[1] if fixed is None else fixed
    weights = jnp.take_along_axis(gates, experts, axis=-1)
    if spec.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return experts, weights * spec.routed_scaling_factor


def _within_best_groups(choice: Float[Array, "N E"], spec: MoeSpec, best: int) -> Float[Array, "N E"]:
    """Minus infinity outside the `topk_group` groups whose `best` best experts score highest together."""
    if spec.n_group == 1:
        return choice
    grouped = choice.reshape(choice.shape[0], spec.n_group, -1)
    group_scores = jax.lax.top_k(grouped, best)[0].sum(-1)
    _, kept_groups = jax.lax.top_k(group_scores, spec.topk_group)
    kept = jax.nn.one_hot(kept_groups, spec.n_group, dtype=jnp.bool_).any(axis=1)
    return jnp.where(kept[..., None], grouped, -jnp.inf).reshape(choice.shape)

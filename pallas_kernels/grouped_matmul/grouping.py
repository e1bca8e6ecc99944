"""Assignments of tokens to experts, sorted by expert."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Grouping(NamedTuple):
    """N * k assignments in order of expert, those of invalid tokens last.

    `tokens[i]` is the token of sorted assignment i; `places[n, j]` is where assignment (n, j) went; `sizes[e]` counts
    the assignments of expert e.
    """

    tokens: Int[Array, "A"]
    places: Int[Array, "N k"]
    sizes: Int[Array, "E"]


def group_by_expert(expert_ids: Int[Array, "N k"], valid: Bool[Array, "N"], num_experts: int) -> Grouping:
    """Sort the assignments; stable, so a token's place within its expert follows its index.

    Assignments to experts that are not here (ids below 0 or from num_experts on) go last, as those of invalid tokens.
    """
    here = valid[:, None] & (expert_ids >= 0) & (expert_ids < num_experts)
    experts = jnp.where(here, expert_ids, num_experts).ravel()
    order = jnp.argsort(experts, stable=True)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(order.size), unique_indices=True)
    sizes = (experts[:, None] == jnp.arange(num_experts)).sum(axis=0, dtype=jnp.int32)
    return Grouping(order // expert_ids.shape[1], places.reshape(expert_ids.shape), sizes)


def combine(
    products: Float[Array, "A D"], grouping: Grouping, weights: Float[Array, "N k"], valid: Bool[Array, "N"]
) -> Float[Array, "N D"]:
    """Each valid token's weighted sum of its experts' products, in float32; 0 for the others."""
    here = valid[:, None] & (grouping.places < grouping.sizes.sum())
    chosen = jnp.where(here[..., None], products[grouping.places], 0).astype(jnp.float32)
    return jnp.einsum("nkd,nk->nd", chosen, jnp.where(here, weights, 0))

"""Assignments of tokens to experts, sorted by expert."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


class Grouping(NamedTuple):
    """N * k assignments in order of expert, those not here last.

    `tokens[i]` is the token of sorted assignment i; `places[n, j]` is where assignment (n, j) went; `sizes[e]` counts
    the assignments of expert e.
    """

    tokens: Int[Array, "A"]
    places: Int[Array, "N k"]
    sizes: Int[Array, "E"]


def assigned_here(expert_ids: Int[Array, "N k"], valid: Bool[Array, "N"], num_experts: int) -> Bool[Array, "N k"]:
    """Which assignments there are: those of valid tokens, unless to experts below 0 or from num_experts on."""
    return valid[:, None] & (expert_ids >= 0) & (expert_ids < num_experts)


def group_by_expert(expert_ids: Int[Array, "N k"], here: Bool[Array, "N k"], num_experts: int) -> Grouping:
    """Sort the assignments; stable, so a token's place within its expert follows its index; those not `here` last."""
    experts = jnp.where(here, expert_ids, num_experts).ravel()
    order = jnp.argsort(experts, stable=True)
    places = jnp.zeros_like(order).at[order].set(jnp.arange(order.size), unique_indices=True)
    sizes = (experts[:, None] == jnp.arange(num_experts)).sum(axis=0, dtype=jnp.int32)
    return Grouping(order // expert_ids.shape[1], places.reshape(expert_ids.shape), sizes)


class Tiles(NamedTuple):
    """Up to so many consecutive assignments of one expert: whose, the first, and the one after the expert's last.

    Tiles behind the last one have none.
    """

    experts: Int[Array, "tiles"]
    firsts: Int[Array, "tiles"]
    ends: Int[Array, "tiles"]


def tiles_by_expert(grouping: Grouping, rows: int) -> Tiles:
    """The assignments of valid tokens in tiles of `rows`, as many as there may be."""
    sizes = grouping.sizes
    count, ends, each = sizes.shape[0], jnp.cumsum(sizes), -(-sizes // rows)
    tile, tile_ends = jnp.arange(most_tiles(grouping.tokens.shape[0], count, rows)), jnp.cumsum(each)
    experts = jnp.searchsorted(tile_ends, tile, side="right", method="compare_all")
    used, experts = experts < count, jnp.minimum(experts, count - 1)
    firsts = (ends - sizes)[experts] + (tile - (tile_ends - each)[experts]) * rows
    return Tiles(experts, jnp.where(used, firsts, 0), jnp.where(used, ends[experts], 0))


def tiles_of_one_token(expert_ids: Int[Array, "1 k"], here: Bool[Array, "1 k"]) -> Tiles:
    """A tile for each of its assignments, in the order they are in: its experts are distinct."""
    first = jnp.arange(expert_ids.size)
    return Tiles(jnp.where(here, expert_ids, 0).ravel(), first, first + here.ravel())


def most_tiles(assignments: int, num_experts: int, rows: int) -> int:
    """However the assignments fall."""
    return (assignments + min(num_experts, assignments) * (rows - 1)) // rows


def combine(
    products: Float[Array, "A D"],
    places: Int[Array, "N k"],
    here: Bool[Array, "N k"],
    weights: Float[Array, "N k"],
) -> Float[Array, "N D"]:
    """Each token's weighted sum of its experts' products, those that are here, in float32."""
    chosen = jnp.where(here[..., None], products[jnp.where(here, places, 0)], 0).astype(jnp.float32)
    return jnp.einsum("nkd,nk->nd", chosen, jnp.where(here, weights, 0))

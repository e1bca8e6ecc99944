"""Compressed attention in plain XLA: all windows of a chunk pooled at once; attention in tiles of queries."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import paging, slots, tiles
from pallas_kernels.padding import zero_padding

# Stands for minus infinity in a running maximum, where a difference of two infinities would be NaN.
_LOWEST = -1e30


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
    """See `pallas_kernels.compressed_attention.pool_windows`."""
    series, stride = values.shape[2], position_bias.shape[0]
    offset = starts % stride
    closed = (offset + lengths) // stride
    old = slots.read(state, layer, read_slots)
    sums = _sums_by_window(values, gates, position_bias, offset, lengths)
    sums = sums.at[:, 0].set(_add(sums[:, 0], old[:, :series]))
    own = sums[:, :, -1]
    # Rows of state after each number of closed windows. After the last window of the chunk comes one without tokens.
    after = jnp.pad(sums, ((0, 0), (0, 1), (0, 0), (0, 0), (0, 0)))
    if series == 2:
        before = jnp.concatenate([old[:, None, 2], sums[:, :, 0]], axis=1)
        own = _add(own, before[:, :-1])
        after = jnp.concatenate([after, before[:, :, None]], axis=2)
    entries = own[:, :, 2] / jnp.where(own[:, :, 1] > 0, own[:, :, 1], 1)
    state = slots.write(
        state, layer, write_slots, lambda row: lax.dynamic_index_in_dim(after[row], closed[row], keepdims=False)
    )
    return entries, closed, state


def _sums_by_window(
    values: Float[Array, "B T S d"],
    gates: Float[Array, "B T S d"],
    position_bias: Float[Array, "m S d"],
    offset: Int[Array, " B"],
    lengths: Int[Array, " B"],
) -> Float[Array, "B W S 3 d"]:
    """Maximum, sum and weighted sum of the chunk's tokens in each window; the first is `offset` tokens into its own."""
    batch, tokens, *series = values.shape
    stride = position_bias.shape[0]
    windows = (tokens + stride - 2) // stride + 1
    token = jnp.arange(windows * stride) - offset[:, None]
    real = ((token >= 0) & (token < lengths[:, None])).reshape(batch, windows, stride, 1, 1)
    token = jnp.clip(token, 0, tokens - 1)[..., None, None]

    def place(x: Float[Array, "B T S d"]) -> Float[Array, "B W m S d"]:
        return jnp.take_along_axis(x, token, axis=1).reshape(batch, windows, stride, *series).astype(jnp.float32)

    scores = jnp.where(real, place(gates) + position_bias, _LOWEST)
    highest = scores.max(axis=2)
    weights = jnp.where(real, jnp.exp(scores - highest[:, :, None]), 0)
    weighted = jnp.where(real, weights * place(values), 0).sum(axis=2)
    return jnp.stack([highest, weights.sum(axis=2), weighted], axis=3)


def _add(x: Float[Array, "*rows 3 d"], y: Float[Array, "*rows 3 d"]) -> Float[Array, "*rows 3 d"]:
    """Maximum, sum and weighted sum over what went into x and into y; a sum of 0 stands for nothing."""
    highest = [jnp.where(z[..., 1, :] > 0, z[..., 0, :], _LOWEST) for z in (x, y)]
    new = jnp.maximum(*highest)
    shrink = [jnp.exp(top - new)[..., None, :] for top in highest]
    sums = shrink[0] * x[..., 1:, :] + shrink[1] * y[..., 1:, :]
    return jnp.concatenate([new[..., None, :], sums], axis=-2)


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
    """See `pallas_kernels.compressed_attention.compressed_attention`."""
    (batch, tokens, heads, width), past = q.shape, window.shape[2]
    old = slots.read(window, layer, read_slots)
    keys = jnp.concatenate([old, zero_padding(kv, lengths).astype(old.dtype)], axis=1)
    tile = tiles.steps(batch * (past + paging.MIN_BLOCK_TOKENS) * (heads + width))
    # The last tile may reach past the last step.
    padded = jnp.pad(keys, ((0, 0), (0, tile), (0, 0)))

    def attend(
        entries: Array | None, q: Float[Array, "B t H d"], step: Int[Array, "B t"], chosen: Array | None = None
    ) -> tuple[Array | None, Float[Array, "B t H d"]]:
        first, count = step[0, 0], q.shape[1]
        near = lax.dynamic_slice_in_dim(padded, first, past + count, axis=1)
        behind = jnp.arange(count)[:, None] + past - jnp.arange(past + count)
        exists = starts[:, None] + first - past + jnp.arange(past + count) >= 0
        visible = ((behind >= 0) & (behind <= past)) & exists[:, None]
        sums = _window_sums(q, near, visible, sinks, scale)
        if chosen is None or entries is None:
            _, total, weighted = sums
            return entries, (weighted / total[..., None]).reshape(q.shape)
        out, entries = paging.attend_chosen(q, entries, chosen, layer, page_table, scale=scale, before=sums)
        return entries, out

    steps = jnp.broadcast_to(jnp.arange(tokens), (batch, tokens))
    arrays = (zero_padding(q, lengths), steps, *([] if chosen is None else [chosen]))
    entries, out = tiles.over(attend, tile, entries, *arrays)
    # Of n real tokens, the last w - 1 keys start at row n: nothing moves when n is 0.
    window = slots.write(
        window, layer, write_slots, lambda row: lax.dynamic_slice_in_dim(keys[row], lengths[row], past)
    )
    return out.astype(q.dtype), window, entries


def _window_sums(
    q: Float[Array, "B t H d"],
    keys: Float[Array, "B n d"],
    visible: Array,
    sinks: Float[Array, " H"],
    scale: float,
) -> paging.SoftmaxSums:
    """The softmax sums of each query [B * t, 1, H] over a sink and its visible keys."""
    batch, steps, heads, width = q.shape
    scores = scale * jnp.einsum("bthd,bnd->bthn", q, keys, preferred_element_type=jnp.float32)
    scores = jnp.where(visible[:, :, None], scores, _LOWEST)
    sinks = sinks.astype(jnp.float32)
    highest = jnp.maximum(scores.max(axis=-1), sinks)
    weights = jnp.exp(scores - highest[..., None])
    total = weights.sum(axis=-1) + jnp.exp(sinks - highest)
    weighted = jnp.einsum("bthn,bnd->bthd", weights.astype(keys.dtype), keys, preferred_element_type=jnp.float32)
    rows = (batch * steps, 1, heads)
    return highest.reshape(rows), total.reshape(rows), weighted.reshape(*rows, width)

"""Compressed attention as its definition reads, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.paged_attention.reference import read_context


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
    """See `pallas_kernels.compressed_attention.pool_windows`. One token after the other."""
    batch, tokens, series, width = values.shape
    stride = position_bias.shape[0]

    def step(carry, t):
        sums, entries, count = carry
        place = (starts + t) % stride
        gate = gates[:, t].astype(jnp.float32) + position_bias[place]
        token = jnp.stack([gate, jnp.ones_like(gate), values[:, t].astype(jnp.float32)], axis=2)
        current = _add(sums[:, :series], token)
        last = sums[:, series:]
        own = current[:, -1] if series == 1 else _add(last[:, 0], current[:, 1])
        closed = (place == stride - 1) & (t < lengths)
        entries = entries.at[jnp.arange(batch), jnp.where(closed, count, entries.shape[1])].set(
            own[:, 2] / own[:, 1], mode="drop"
        )
        after = jnp.concatenate([jnp.zeros_like(current), current[:, :1] if series == 2 else last], axis=1)
        after = jnp.where(closed[:, None, None, None], after, jnp.concatenate([current, last], axis=1))
        sums = jnp.where((t < lengths)[:, None, None, None], after, sums)
        return (sums, entries, count + closed), None

    entries = jnp.zeros((batch, (tokens + stride - 2) // stride + 1, width))
    carry = (state[layer, read_slots], entries, jnp.zeros_like(lengths))
    (sums, entries, count), _ = jax.lax.scan(step, carry, jnp.arange(tokens))
    return entries, count, state.at[layer, write_slots].set(sums)


def _add(x: Float[Array, "*rows 3 d"], y: Float[Array, "*rows 3 d"]) -> Float[Array, "*rows 3 d"]:
    """Maximum, sum and weighted sum over what went into x and into y; a sum of 0 stands for nothing."""
    highest = [jnp.where(z[..., 1, :] > 0, z[..., 0, :], -jnp.inf) for z in (x, y)]
    new = jnp.maximum(*highest)
    factors = [jnp.where(top > -jnp.inf, jnp.exp(top - new), 0) for top in highest]
    both = [sum(f * z[..., part, :] for f, z in zip(factors, (x, y), strict=True)) for part in (1, 2)]
    return jnp.stack([jnp.where(new > -jnp.inf, new, 0), *both], axis=-2)


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
    (batch, tokens, heads, _), past = q.shape, window.shape[2]
    real = (jnp.arange(tokens) < lengths[:, None])[..., None]
    new = jnp.where(real, kv.astype(jnp.float32), 0)
    keys = jnp.concatenate([window[layer, read_slots].astype(jnp.float32), new], axis=1)
    steps, places = jnp.arange(tokens)[:, None], jnp.arange(past + tokens) - past
    visible = (places <= steps) & (places >= steps - past) & (starts[:, None, None] + places >= 0)
    kept = jnp.take_along_axis(keys, (lengths[:, None] + jnp.arange(past))[..., None], axis=1)
    if entries is not None and chosen is not None:
        pooled = read_context(entries, layer, page_table, jnp.zeros_like(starts), chosen.max(axis=(1, 2)) + 1)
        keys = jnp.concatenate([keys, pooled], axis=1)
        is_chosen = (chosen[..., None] == jnp.arange(pooled.shape[1])).any(axis=2)
        visible = jnp.concatenate([visible, is_chosen], axis=-1)
    scores = scale * jnp.einsum("bthd,bnd->bthn", jnp.where(real[..., None], q, 0).astype(jnp.float32), keys)
    scores = jnp.where(visible[:, :, None], scores, -jnp.inf)
    sink = jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], (batch, tokens, heads, 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, sink], axis=-1), axis=-1)[..., :-1]
    out = jnp.einsum("bthn,bnd->bthd", weights, keys)
    return out.astype(q.dtype), window.at[layer, write_slots].set(kept.astype(window.dtype)), entries

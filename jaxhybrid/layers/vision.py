"""A vision tower, Qwen3-VL's (arXiv 2511.21631) or MoonViT (2504.07491): a frame's patches to its tokens' embeddings.

Attention spans a frame and nothing else, so a video is its frames one by one. Patches come in the order in which they
are merged: the `spatial_merge_size` squared patches of a token, then those of the next.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int, Shaped

from jaxhybrid.layers.linear import Linear
from jaxhybrid.layers.norm import LayerNorm, RmsNorm
from jaxhybrid.layers.parameter import parameter, with_leading_axis
from jaxhybrid.vision_spec import VisionSpec

QUERY_TILE = 256  # queries whose scores over all patches are held at once
WHOLE = (None, None)  # on a mesh every device holds all of the tower, which is small beside the decoder
MIN_PATCHES = 64  # the least a program is compiled for


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FrameInputs:
    """One frame of N patches, padded: the first `count` are real.

    `patches`: pixels of each, [channel, time, row, column] flattened. `taps`, `tap_weights`: which entries of the
    square table of position embeddings make up each patch's, and in what parts. `rows`, `columns`: its place.
    """

    patches: Float[Array, "N F"]
    taps: Int[Array, "N 4"]
    tap_weights: Float[Array, "N 4"]
    rows: Int[Array, " N"]
    columns: Int[Array, " N"]
    count: Int[Array, ""]


def frame_inputs(patches: Float32[np.ndarray, "n F"], height: int, width: int, spec: VisionSpec) -> FrameInputs:
    """A still of height x width patches, padded to a power of two of at least `MIN_PATCHES`."""
    merge, side = spec.spatial_merge_size, math.isqrt(spec.num_position_embeddings)
    padded = max(MIN_PATCHES, 1 << (len(patches) - 1).bit_length())

    def filled(values: Shaped[np.ndarray, "n *rest"]) -> Shaped[Array, "N *rest"]:
        return jnp.asarray(np.pad(values, [(0, padded - len(values)), *[(0, 0)] * (values.ndim - 1)]))

    blocks = (height // merge, merge, width // merge, merge)
    rows, columns = (axis.reshape(blocks).swapaxes(1, 2).ravel() for axis in np.indices((height, width)))
    # The table is stretched over the still and read bilinearly.
    places = _corners if spec.align_corners else _edges
    exact = (places(rows, height, side), places(columns, width, side))
    lower = [np.floor(axis).astype(np.int64) for axis in exact]
    share = [axis - below for axis, below in zip(exact, lower, strict=True)]
    taps, weights = [], []
    for down, right in np.ndindex(2, 2):
        row, column = (np.minimum(low + step, side - 1) for low, step in zip(lower, (down, right), strict=True))
        taps.append(row * side + column)
        weights.append(np.abs(1 - down - share[0]) * np.abs(1 - right - share[1]))
    return FrameInputs(
        patches=filled(patches),
        taps=filled(np.stack(taps, axis=-1).astype(np.int32)),
        tap_weights=filled(np.stack(weights, axis=-1).astype(np.float32)),
        rows=filled(rows.astype(np.int32)),
        columns=filled(columns.astype(np.int32)),
        count=jnp.int32(len(patches)),
    )


def _corners(index: Int[np.ndarray, " n"], size: int, side: int) -> Float[np.ndarray, " n"]:
    """Where `size` points fall among `side` entries, first on first and last on last."""
    return index * (side - 1) / max(size - 1, 1)


def _edges(index: Int[np.ndarray, " n"], size: int, side: int) -> Float[np.ndarray, " n"]:
    """Likewise with points and entries in the middle of equal parts of one length; none beyond the outer entries."""
    return np.clip((index + 0.5) * side / size - 0.5, 0, side - 1)


def _norm(spec: VisionSpec, dtype: DTypeLike) -> LayerNorm | RmsNorm:
    kind = {"layer": LayerNorm, "rms": RmsNorm}[spec.norm]
    return kind(spec.hidden_size, spec.norm_eps, dtype)


class VisionBlock(nnx.Module):
    """x += W_o attend(norm x); x += W_2 gelu(W_1 norm x)."""

    def __init__(self, spec: VisionSpec, dtype: DTypeLike) -> None:
        width, inner, heads = spec.hidden_size, spec.intermediate_size, spec.attention_size
        self.spec = spec
        self.norm1, self.norm2 = _norm(spec, dtype), _norm(spec, dtype)
        self.qkv = Linear(width, 3 * heads, WHOLE, dtype, spec.bias)
        self.proj = Linear(heads, width, WHOLE, dtype, spec.bias)
        self.linear_fc1 = Linear(width, inner, WHOLE, dtype, spec.bias)
        self.linear_fc2 = Linear(inner, width, WHOLE, dtype, spec.bias)

    def __call__(
        self, x: Float[Array, "N D"], angles: Float[Array, "N half"], count: Int[Array, ""]
    ) -> Float[Array, "N D"]:
        heads = self.spec.num_heads
        q, k, v = jnp.moveaxis(self.qkv(self.norm1(x)).reshape(x.shape[0], 3, heads, -1), 1, 0)
        mixed = attend(_turn(q, angles), _turn(k, angles), v, count)
        x = x + self.proj(mixed.reshape(x.shape[0], -1))
        return x + self.linear_fc2(jax.nn.gelu(self.linear_fc1(self.norm2(x)), approximate=True))


def _turn(x: Float[Array, "N H d"], angles: Float[Array, "N half"]) -> Float[Array, "N H d"]:
    """Turns channel pairs (i, i + d / 2), in float32."""
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attend(
    q: Float[Array, "N H d"], k: Float[Array, "N H d"], v: Float[Array, "N H d"], count: Int[Array, ""]
) -> Float[Array, "N H d"]:
    """Softmax attention of all patches over the first `count`, a tile of queries at a time."""
    patches, heads, dim = q.shape
    hidden = jnp.where(jnp.arange(patches) < count, 0.0, -jnp.inf)

    def tile(queries: Float[Array, "Q H d"]) -> Float[Array, "Q H d"]:
        scores = jnp.einsum("qhd,khd->hqk", queries, k, preferred_element_type=jnp.float32) * dim**-0.5
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores + hidden, axis=-1).astype(v.dtype), v)

    size = min(patches, QUERY_TILE)
    return jax.lax.map(tile, q.reshape(patches // size, size, heads, dim)).reshape(q.shape)


class VisionTower(nnx.Module):
    """Patch embedding, learned and rotary positions, blocks (in one stack, run by a scan), merger."""

    def __init__(self, spec: VisionSpec, dtype: DTypeLike) -> None:
        self.spec = spec
        width, merged = spec.hidden_size, spec.hidden_size * spec.patches_per_token
        self.patch_embed = Linear(spec.patch_features, width, WHOLE, dtype, spec.bias)
        self.pos_embed = parameter((spec.num_position_embeddings, width), (None, None), dtype)
        self.blocks = with_leading_axis(VisionBlock(spec, dtype), spec.depth)
        self.merger_norm = _norm(spec, dtype)
        self.merger_linear_fc1 = Linear(merged, merged, WHOLE, dtype, spec.bias)
        self.merger_linear_fc2 = Linear(merged, spec.out_hidden_size, WHOLE, dtype, spec.bias)
        if spec.output_norm_eps is not None:
            self.output_norm = RmsNorm(spec.out_hidden_size, spec.output_norm_eps, dtype)

    def __call__(self, frame: FrameInputs) -> Float[Array, "n D"]:
        """Embeddings of the frame's tokens; those after the real ones are of no meaning."""
        x = self.patch_embed(frame.patches.astype(self.pos_embed.dtype))
        learned = self.pos_embed[...][frame.taps] * frame.tap_weights[..., None].astype(x.dtype)
        x = x + learned.sum(axis=1)
        angles = self._angles(frame)
        graph, stack = nnx.split(self.blocks)
        x, _ = jax.lax.scan(lambda x, block: (nnx.merge(graph, block)(x, angles, frame.count), None), x, stack)
        joined = self.merger_norm(x).reshape(-1, x.shape[1] * self.spec.patches_per_token)
        made = self.merger_linear_fc2(jax.nn.gelu(self.merger_linear_fc1(joined), approximate=False))
        return made if self.spec.output_norm_eps is None else self.output_norm(made)

    def _angles(self, frame: FrameInputs) -> Float[Array, "N half"]:
        """A quarter of a head's channels turns by the row, a quarter by the column; the other half pairs with them."""
        quarter = self.spec.head_dim // 4
        turns = self.spec.rope_theta ** (-jnp.arange(quarter, dtype=jnp.float32) / quarter)
        return jnp.concatenate([frame.rows[:, None] * turns, frame.columns[:, None] * turns], axis=-1)

"""Vectors on a TPU: normalised, spread along lanes, and multiplied with each other, all to float32's precision."""

import functools
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Dot:
    """Products over the given axes of float32 factors if exact, else of bfloat16 ones, summed in float32."""

    def __init__(self, exact: bool) -> None:
        self._options = {"precision": "highest"} if exact else {}
        self.exact = exact
        self.dtype = jnp.float32 if exact else jnp.bfloat16

    def __call__(self, a: Float[Array, "_ _"], b: Float[Array, "_ _"], contract: tuple[int, int] = (1, 0)):
        a, b = a.astype(self.dtype), b.astype(self.dtype)
        numbers = (((contract[0],), (contract[1],)), ((), ()))
        return jax.lax.dot_general(a, b, numbers, preferred_element_type=jnp.float32, **self._options)


# Of a matrix unit, or half of it: columns of a left factor that one pass takes.
_DEPTH = 128


class Spread:
    """Rows of [n, dk] arrays, each as a [dk, dv] matrix with equal columns: what scales the rows of a state.

    Broadcasting along lanes would keep the permute unit busy for longer than the states take to arrive. The matrix unit
    is idle, and its product with a 0/1 matrix does it too, but for the last bit: a float32 number is a sum of three
    bfloat16 ones.
    """

    def __init__(self, counts: Sequence[int], width: int) -> None:
        self._counts, self._width = tuple(counts), width
        # Where one pass of the matrix unit does not take all rows, it takes a group of them.
        rows = self._counts[0]
        fitting = [n for n in range(1, rows + 1) if rows % n == 0 and n * 3 * len(self._counts) <= _DEPTH]
        apart = len(set(self._counts)) == 1 and sum(self._counts) * 3 > _DEPTH and fitting
        self._groups = rows // max(fitting) if apart else 1

    @property
    def depth(self) -> int:
        """Columns of `columns`."""
        return 3 * sum(self._counts) if self._groups == 1 else self._groups * _DEPTH

    def columns(self, arrays: Sequence[Float[Array, "_ dk"]]) -> Float[Array, "dk depth"]:
        """Of arrays with as many rows as `counts` say: their parts, turned; a group of rows after the other."""
        split = [part for x in arrays for part in bfloat16_parts(x)]
        if self._groups == 1:
            return jnp.concatenate(split).T.astype(jnp.bfloat16)
        rows = self._counts[0] // self._groups
        filling = jnp.zeros((_DEPTH - rows * len(split), split[0].shape[1]), jnp.float32)
        groups = [
            x for first in range(0, self._counts[0], rows) for x in [*(p[first : first + rows] for p in split), filling]
        ]
        return jnp.concatenate([x for x in groups if len(x)]).T.astype(jnp.bfloat16)

    def __call__(self, columns: Float[Array, "dk depth"], picks: Sequence[int]) -> list[Float[Array, "dk dv"]]:
        """Row picks[i] of array i, for all arrays in one product; rows of one group, where there are several."""
        counts = [count // self._groups for count in self._counts]
        (group,) = {pick // count for pick, count in zip(picks, counts, strict=True)} if self._groups > 1 else {0}
        depth = self.depth // self._groups
        row = jax.lax.broadcasted_iota(jnp.int32, (depth, self._width), 0)
        starts = [3 * sum(counts[:i]) for i in range(len(counts))]
        selectors = []
        for start, count, pick in zip(starts, counts, picks, strict=True):
            own = jnp.where((row >= start) & (row < start + 3 * count), (row - start) % count, -1)
            selectors.append((own == pick % count).astype(jnp.bfloat16))
        own_columns = columns[:, group * depth : (group + 1) * depth]
        product = jnp.dot(own_columns, jnp.concatenate(selectors, axis=1), preferred_element_type=jnp.float32)
        return [product[:, i * self._width : (i + 1) * self._width] for i in range(len(picks))]


class Columns:
    """`Spread` of arrays that are at hand."""

    def __init__(self, arrays: list[Float[Array, "_ dk"]], width: int) -> None:
        self._spread = Spread([len(x) for x in arrays], width)
        self._columns = self._spread.columns(arrays)

    def __call__(self, *picks: int) -> list[Float[Array, "dk dv"]]:
        return self._spread(self._columns, picks)


def bfloat16_parts(x: Float[Array, "n d"], count: int = 3) -> list[Float[Array, "n d"]]:
    """Float32 arrays whose sum is x, all but the last of bfloat16 precision; of three parts the last is so too."""
    found = []
    for _ in range(count - 1):
        found.append(x.astype(jnp.bfloat16).astype(jnp.float32))
        x = x - found[-1]
    return [*found, x]


def normalised(x: Float[Array, "*_ d"]) -> Float[Array, "*_ d"]:
    """In float32, divided by sqrt(sum of squares + 1e-6)."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + 1e-6)


def for_value_heads(x: Float[Array, "hk *_"], groups: int) -> Float[Array, "hv *_"]:
    """Each key head's vectors once for each of its value heads."""
    return x if groups == 1 else jnp.stack([x[head // groups] for head in range(groups * len(x))])


def product(x: Float[Array, "n _"], S: Float[Array, "_ _"], contract: tuple[int, int] = (1, 0)) -> Float[Array, "n _"]:
    """x S over the given axes. The parts of x lie one below the other, so that each part of S is loaded once."""
    rows, numbers = len(x), (((contract[0],), (contract[1],)), ((), ()))
    x = jnp.concatenate(bfloat16_parts(x)).astype(jnp.bfloat16)
    products = []
    for part, used in zip(bfloat16_parts(S), (3, 2, 1), strict=True):
        found = jax.lax.dot_general(
            x[: used * rows], part.astype(jnp.bfloat16), numbers, preferred_element_type=jnp.float32
        )
        products += [found[i * rows : (i + 1) * rows] for i in range(used)]
    return functools.reduce(operator.add, products)


# Parts of the left and right factor whose products matter: all but those below 2^-24 of the largest.
_PAIRS = ((0, 0), (0, 1), (1, 0), (0, 2), (2, 0), (1, 1))


def outer_products(k: Float[Array, "n dk"], u: Float[Array, "n dv"]) -> Float[Array, "dk dv"]:
    """sum_i k_i u_i^T as one product of bfloat16 factors: their parts lie one below the other."""
    ks, us = bfloat16_parts(k), bfloat16_parts(u)
    left = jnp.concatenate([ks[i] for i, _ in _PAIRS]).astype(jnp.bfloat16)
    right = jnp.concatenate([us[i] for _, i in _PAIRS]).astype(jnp.bfloat16)
    return jax.lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def fold(
    S: Float[Array, "dk dv"],
    k: Float[Array, "n dk"],
    u: Float[Array, "n dv"],
    log_decay: Float[Array, "n dk"] | Float[Array, "n 1"],
) -> Float[Array, "dk dv"]:
    """One head's state after n update records: d(n) S + sum_i (d(i, n) k_i) u_i^T."""
    later = sums_of_later_rows(log_decay)
    added = outer_products(k * jnp.exp(later), u)
    total = jnp.exp(later[:1] + log_decay[:1])
    if total.shape[1] > 1:
        (total,) = Columns([total], S.shape[1])(0)
    return total * S + added


def sums_of_later_rows(x: Float[Array, "n d"]) -> Float[Array, "n d"]:
    """For each row the sum of the rows after it, by doubling: no sum is a difference of others."""

    def moved_up(x, rows):
        return jnp.concatenate([x[rows:], jnp.zeros_like(x[:rows])])

    if len(x) == 1:
        return jnp.zeros_like(x)
    sums, rows = moved_up(x, 1), 1
    while rows < len(x):
        sums = sums + moved_up(sums, rows)
        rows *= 2
    return sums


def spread(
    x: Float[Array, "n h"], width: int, first: Int[Array, ""] | int, heads: int
) -> Float[Array, "n heads*width"]:
    """Columns `first` to `first + heads` of x, each `width` times side by side: a product with a 0/1 matrix."""
    head, lane = (jax.lax.broadcasted_iota(jnp.int32, (x.shape[1], heads * width), axis) for axis in (0, 1))
    selector = (head == first + lane // width).astype(jnp.bfloat16)
    parts = jnp.concatenate(bfloat16_parts(x)).astype(jnp.bfloat16)
    found = jnp.dot(parts, selector, preferred_element_type=jnp.float32)
    return found[: len(x)] + found[len(x) : 2 * len(x)] + found[2 * len(x) :]

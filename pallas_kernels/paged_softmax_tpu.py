"""Causal softmax attention over paged rows on TPU, for queries of a few heads that share their keys.

Pages stay in HBM. A grid step has the queries of some tokens of one sequence and goes through the blocks of keys that
they see: each page is one copy to VMEM, started a block ahead, and at the end of a step the next step's first block,
so that no step waits for its first. Blocks after the last token or before a window are neither fetched nor computed.
A group of heads with the same keys, times the step's tokens, are the rows of one matrix. Maximum, sum and accumulator
are float32 (Milakov and Gimelshein 2018).
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

LANES = 128
LOG2_E = math.log2(math.e)
VMEM_BYTES = 48 << 20
# The page table of a kernel's rows lies in SMEM.
TABLE_BYTES = 1 << 19
# Stands for minus infinity in a running maximum, where a difference of two infinities would be NaN.
_LOWEST = -1e30


@dataclass(frozen=True)
class Plan:
    """Of one grid step: query tokens (a power of two), groups of heads, and pages of a block of keys."""

    tokens: int
    groups: int
    pages: int


@dataclass(frozen=True)
class Rules:
    """What scores go through. `factor` is of the exponent of 2, on scores as they come out of the product or, with a
    cap, out of the hyperbolic tangent, whose argument is scaled by `cap_factor`."""

    factor: float
    cap_factor: float | None
    window: int | None


def rules(scale: float, window: int | None = None, soft_cap: float | None = None) -> Rules:
    """`scale`, `window` and `soft_cap` as `pallas_kernels.paged_attention.paged_attention` defines them."""
    if soft_cap is None:
        return Rules(scale * LOG2_E, None, window)
    return Rules(soft_cap * LOG2_E, scale / soft_cap, window)


def refusal(pages: tuple[Array, ...], page_table: Array, max_length: int | None) -> str | None:
    """Why pages of these shapes cannot be copied, or None."""
    tile = 32 // pages[0].dtype.itemsize
    for array in pages:
        if array.shape[2] % tile:
            return f"pages of {array.shape[2]} tokens are not a multiple of {tile}"
    if page_table.shape[1] * 4 > TABLE_BYTES:
        return f"{page_table.shape[1]} pages of a row are more than {TABLE_BYTES >> 10} KiB of page table"
    if max_length is not None:
        return "max_length asks for a form that can be differentiated"
    return None


def block_pages(page: int, row_bytes: int, table_width: int, block_bytes: int, most_tokens: int) -> int:
    """Pages of a block: whole lane tiles of keys, about `block_bytes`, no more than a table or `most_tokens` need."""
    unit = math.lcm(page, LANES) // page
    needed = pl.cdiv(min(table_width, pl.cdiv(most_tokens, page)), unit)
    fitting = block_bytes // (unit * page * row_bytes)
    return unit * max(1, min(needed, fitting))


def grouped(q: Float[Array, "B T Hq d"], groups: int, tokens: int) -> Float[Array, "B N G R d"]:
    """Queries as `attend` takes them: a group's heads one after the other."""
    batch, length, heads, dim = q.shape
    blocks = pl.cdiv(length, tokens)
    q = jnp.pad(q, [(0, 0), (0, blocks * tokens - length), (0, 0), (0, 0)])
    q = q.reshape(batch, blocks, tokens, groups, heads // groups, dim).transpose(0, 1, 3, 4, 2, 5)
    return q.reshape(batch, blocks, groups, -1, dim)


def ungrouped(out: Float[Array, "B N G R dv"], tokens: int) -> Float[Array, "B T Hq dv"]:
    """The result of `attend` with tokens before heads again."""
    batch, blocks, groups, _, dim = out.shape
    out = out.reshape(batch, blocks, groups, -1, tokens, dim).transpose(0, 1, 4, 2, 3, 5)
    return out.reshape(batch, blocks * tokens, -1, dim)


def attend(
    q: Float[Array, "B N G R d"],
    k_pages: Float[Array, "L P page G*c*d"],
    v_pages: Float[Array, "L P page G*c*dv"] | None,
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B W"],
    starts: Int[Array, "B"],
    lengths: Int[Array, "B"],
    plan: Plan,
    rule: Rules,
    *,
    value_dim: int,
    together: int = 1,
    sinks: Float[Array, "G R"] | None = None,
    expansion: Float[Array, "G r _"] | None = None,
    name: str,
    interpret: Any = False,
) -> Float[Array, "B N G R dv"]:
    """softmax(q k^T) v of every row, in q's dtype; tokens after a sequence's last give anything finite.

    One kernel for as many rows as have their page tables in SMEM together.

    Args:
      q: N blocks of `plan.tokens` query tokens, of which the last may be padding; G groups of heads; row r of a group
        is token r % plan.tokens of some head. Padding may be NaN: no row leaks into another.
      k_pages, v_pages: a row has the keys or values of c = `together` key heads of each group, side by side; the first
        R / c rows of a group use the first of them, and so on. Without `v_pages`, and with one group, values are the
        first `value_dim` lanes of keys.
      sinks: a logit per row that joins its denominator.
      expansion: without `v_pages`, what the first r lanes of a row are multiplied by to give a group's keys, less the
        last lanes of `q`, which all groups have from the row, and then values. All groups share the rows.
    """
    batch, blocks, groups, rows, dim = q.shape
    page, width = k_pages.shape[2], page_table.shape[1]
    fitting = TABLE_BYTES // (4 * width)
    if batch > fitting:
        some = [slice(first, first + fitting) for first in range(0, batch, fitting)]
        outs = [
            attend(
                q[part], k_pages, v_pages, layer, page_table[part], starts[part], lengths[part], plan, rule,
                value_dim=value_dim, together=together, sinks=sinks, expansion=expansion, name=name,
                interpret=interpret,
            )
            for part in some
        ]  # fmt: skip
        return jnp.concatenate(outs)
    parts, keys = groups // plan.groups, plan.pages * page
    # Rows are shared out between two cores, where a chip has two. Each core fetches ahead for itself.
    steps = batch * parts * blocks
    cores = 2 if steps % 2 == 0 else 1
    layout = _Layout(
        steps // cores, parts, blocks, plan, rule, page, keys, width, together, together * dim, together * value_dim
    )
    shared = expansion is not None

    def place(core, step, *_):
        row, part, block = layout.place(core * layout.steps + step)
        return row, block, part, 0, 0

    specs = [pl.BlockSpec((None, None, plan.groups, rows, dim), place)]
    operands = [q]
    if sinks is not None:
        unit = rule.factor / LOG2_E
        operands.append(jnp.broadcast_to(sinks.astype(jnp.float32)[..., None] / unit, (groups, rows, LANES)))
        specs.append(pl.BlockSpec((plan.groups, rows, LANES), lambda *at: (place(*at)[2], 0, 0)))
    if expansion is not None:
        operands.append(expansion)
        specs.append(pl.BlockSpec((plan.groups, *expansion.shape[1:]), lambda *at: (place(*at)[2], 0, 0)))
    pages = [k_pages] if v_pages is None else [k_pages, v_pages]
    widths = [x.shape[3] // (1 if shared else parts) for x in pages]
    most = width * page
    if rule.window is not None:
        most = min(most, pl.cdiv(rule.window + plan.tokens - 1, page) * page)
    reach = batch * blocks * most
    return pl.pallas_call(
        lambda *refs: _kernel(layout, sinks is not None, shared, len(pages), *refs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(cores, layout.steps),
            in_specs=[*specs, *[pl.BlockSpec(memory_space=pl.ANY)] * len(pages)],
            out_specs=pl.BlockSpec((None, None, plan.groups, rows, value_dim), place),
            scratch_shapes=[
                *(pltpu.VMEM((2, keys, each), k_pages.dtype) for each in widths),
                pltpu.VMEM((plan.groups, rows, LANES), jnp.float32),
                pltpu.VMEM((plan.groups, rows, LANES), jnp.float32),
                pltpu.VMEM((plan.groups, rows, layout.value_dim), jnp.float32),
                *([pltpu.VMEM((plan.groups, rows, layout.dim), q.dtype)] if together > 1 else []),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((len(pages), 2)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, blocks, groups, rows, value_dim), q.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=VMEM_BYTES,
            # They would be several bundles for every page.
            disable_bounds_checks=True,
        ),
        # Of full tables or windows: how many pages a call reads is known only when it runs.
        cost_estimate=pl.CostEstimate(
            flops=2 * reach * groups * rows * (layout.dim + layout.value_dim),
            transcendentals=reach * groups * rows,
            bytes_accessed=sum(reach * parts * pl.cdiv(each, LANES) * LANES * k_pages.dtype.itemsize for each in widths)
            + q.size * q.dtype.itemsize * (dim + value_dim) // dim,
        ),
        interpret=interpret,
        name=name,
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        page_table.astype(jnp.int32).reshape(-1),
        *(x.astype(jnp.int32) for x in (starts, lengths)),
        *operands,
        *pages,
    )


@dataclass(frozen=True)
class _Layout:
    """Static figures of a call: grid steps of a core, parts of the groups and blocks of the tokens, and the above."""

    steps: int
    parts: int
    blocks: int
    plan: Plan
    rule: Rules
    page: int
    keys: int
    table_width: int
    together: int
    dim: int
    value_dim: int

    def place(self, step):
        """Row, part and block of a grid step."""
        part, block = _divided(step, self.blocks)
        row, part = _divided(part, self.parts)
        return row, part, block


def _divided(x, by: int):
    return (x, 0) if by == 1 else (jax.lax.div(x, jnp.int32(by)), jax.lax.rem(x, jnp.int32(by)))


class _Span(NamedTuple):
    """What a grid step goes through: its row and part, the position of its first query, the positions from `begin`, a
    page's first, up to `end`, and how many blocks of them; at least one, of no key at all."""

    row: Any
    part: Any
    first: Any
    begin: Any
    end: Any
    count: Any


def _span(layout: _Layout, starts, lengths, step) -> _Span:
    row, part, block = layout.place(step)
    tokens, window, page = layout.plan.tokens, layout.rule.window, jnp.int32(layout.page)
    before = block * tokens
    first = starts[row] + before
    real = jnp.clip(lengths[row] - before, 0, tokens)
    end = jnp.where(real > 0, first + real, 0)
    reach = 0 if window is None else jax.lax.div(jnp.maximum(first - window + 1, 0), page) * page
    begin = jnp.where(real > 0, reach, 0)
    count = jax.lax.div(end - begin + layout.keys - 1, jnp.int32(layout.keys))
    return _Span(row, part, first, begin, end, jnp.maximum(count, 1))


class _Fetch:
    """Copies of a block's pages from HBM to one of the two buffers of each array."""

    def __init__(self, layout: _Layout, layer, table, arrays, buffers, semaphores) -> None:
        self._layout, self._layer, self._table = layout, layer, table
        self._arrays, self._buffers, self._semaphores = arrays, buffers, semaphores

    def start(self, span: _Span, index, slot) -> None:
        first, count = self._pages(span, index)
        whole = self._layout.plan.pages

        def start_page(place):
            page_id = self._table[span.row * self._layout.table_width + first + place]
            for copy in self._copies(span, page_id, place, slot):
                copy.start()

        def start_block():
            for place in range(whole):
                start_page(place)

        pl.when(count == whole)(start_block)
        pl.when(count != whole)(lambda: pl.loop(0, count)(start_page))

    def wait(self, span: _Span, index, slot) -> None:
        _, count = self._pages(span, index)
        whole = self._layout.plan.pages

        def wait_page(place):
            for copy in self._copies(span, 0, place, slot):
                copy.wait()

        def wait_block():
            for number, buffer in enumerate(self._buffers):
                pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], self._semaphores.at[number, slot]).wait()

        pl.when(count == whole)(wait_block)
        pl.when(count != whole)(lambda: pl.loop(0, count)(wait_page))

    def _pages(self, span: _Span, index):
        """First page of a block in the row's table, and how many of its pages hold tokens."""
        page = jnp.int32(self._layout.page)
        first = jax.lax.div(span.begin, page) + index * self._layout.plan.pages
        last = jax.lax.div(span.end + page - 1, page)
        return first, jnp.clip(last - first, 0, self._layout.plan.pages)

    def _copies(self, span: _Span, page_id, place, slot):
        page = self._layout.page
        for number, (array, buffer) in enumerate(zip(self._arrays, self._buffers, strict=True)):
            width = buffer.shape[-1]
            source = array.at[self._layer, page_id]
            if array.shape[-1] != width:
                source = source.at[:, pl.ds(pl.multiple_of(span.part * width, LANES), width)]
            target = buffer.at[slot, pl.ds(pl.multiple_of(place * page, page), page)]
            yield pltpu.make_async_copy(source, target, self._semaphores.at[number, slot])


def _kernel(layout: _Layout, with_sinks: bool, expands: bool, arrays: int, layer, table, starts, lengths, q, *refs):
    """Blocks: q, out [g, R, d]; sinks, highest, total [g, R, 128], of which total has lanes still to be added up;
    expansion [g, r, _];
    sums [g, R, c dv]; wide [g, R, c d]; buffers [2, S, g c d]."""
    sinks, refs = (refs[0], refs[1:]) if with_sinks else (None, refs)
    expansion, refs = (refs[0], refs[1:]) if expands else (None, refs)
    pages, out, buffers = refs[:arrays], refs[arrays], refs[arrays + 1 : 2 * arrays + 1]
    highest, total, sums, *wide, kept_slot, semaphores = refs[2 * arrays + 1 :]
    step = pl.program_id(1)
    number = pl.program_id(0) * layout.steps + step
    fetch = _Fetch(layout, layer[0], table, pages, buffers, semaphores)
    span = _span(layout, starts, lengths, number)
    following = _span(layout, starts, lengths, jnp.minimum(number + 1, pl.num_programs(0) * layout.steps - 1))

    @pl.when(step == 0)
    def _():
        kept_slot[0] = 0
        fetch.start(span, 0, 0)

    if sinks is None:
        highest[...] = jnp.full_like(highest, _LOWEST)
        total[...] = jnp.zeros_like(total)
    else:
        highest[...] = sinks[...]
        total[...] = (jax.lax.broadcasted_iota(jnp.int32, total.shape, 2) == 0).astype(jnp.float32)
    sums[...] = jnp.zeros_like(sums)
    if wide:
        _widen(layout.together, q, wide[0])
        q = wide[0]

    def block(index, slot):
        last = index + 1 == span.count

        @pl.when(jnp.logical_not(last & (step + 1 == layout.steps)))
        def _():
            ahead = _Span(*(jnp.where(last, there, here) for there, here in zip(following, span, strict=True)))
            fetch.start(ahead, jnp.where(last, 0, index + 1), 1 - slot)

        fetch.wait(span, index, slot)
        operands = (q, buffers, expansion, highest, total, sums)
        attend = functools.partial(_attend_block, layout, span, index, slot, *operands)
        start = span.begin + index * layout.keys
        if layout.plan.tokens == 1:
            _clear_after(buffers[-1], slot, span.end - start)
            attend(masked=True)
            return 1 - slot
        all_seen = start + layout.keys <= jnp.minimum(span.first + 1, span.end)
        if layout.rule.window is not None:
            all_seen &= start > span.first + layout.plan.tokens - 1 - layout.rule.window

        @pl.when(all_seen)
        def _():
            attend(masked=False)

        @pl.when(jnp.logical_not(all_seen))
        def _():
            _clear_after(buffers[-1], slot, span.end - start)
            attend(masked=True)

        return 1 - slot

    kept_slot[0] = jax.lax.fori_loop(0, span.count, block, kept_slot[0])
    for group in range(out.shape[0]):
        denominator = total[group].sum(axis=1, keepdims=True)
        # No key at all: 0 / 1.
        mean = sums[group] / jnp.where(denominator > 0, denominator, 1)
        out[group] = _own_lanes(layout.together, mean).astype(out.dtype)


def _own(together: int, rows: int, width: int):
    """Whether a lane belongs to the head of its row."""
    row, lane = (jax.lax.broadcasted_iota(jnp.int32, (rows, width), axis) for axis in (0, 1))
    heads = [(row >= n * rows // together) == (lane >= n * width // together) for n in range(1, together)]
    return functools.reduce(jnp.logical_and, heads)


def _widen(together: int, q, wide) -> None:
    """Queries with zeros at the lanes of the other heads of their group."""
    for group in range(q.shape[0]):
        copies = jnp.concatenate([q[group].astype(jnp.float32)] * together, axis=1)
        wide[group] = jnp.where(_own(together, *copies.shape), copies, 0).astype(wide.dtype)


def _own_lanes(together: int, x: Float[Array, "R c*dv"]) -> Float[Array, "R dv"]:
    """Of each row the lanes of its head."""
    if together == 1:
        return x
    width = x.shape[1] // together
    x = jnp.where(_own(together, *x.shape), x, 0)
    return sum((x[:, n * width : (n + 1) * width] for n in range(1, together)), x[:, :width])


def _clear_after(buffer, slot, left) -> None:
    """Zeros in the rows of a block after its last token, which may hold NaN: a weight of 0 would not hide that."""
    rows = buffer.shape[1]

    @pl.loop(jax.lax.div(jnp.minimum(left, rows), jnp.int32(LANES)), rows // LANES)
    def _(tile):
        here = pl.ds(pl.multiple_of(tile * LANES, LANES), LANES)
        values = buffer[slot, here]
        row = tile * LANES + jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)
        buffer[slot, here] = jnp.where(row < left, values, jnp.zeros_like(values))


def _attend_block(
    layout: _Layout, span: _Span, index, slot, q, buffers, expansion, highest, total, sums, *, masked
) -> None:
    groups, rows, _ = q.shape
    keys, rule = layout.keys, layout.rule
    options: Any = {"preferred_element_type": jnp.float32}
    if q.dtype == jnp.float32:
        options["precision"] = "highest"
    # Every step for all groups before the next one: a product's result comes long after it was asked for.
    stored = [_keys_and_values(layout, buffers, slot, expansion, g, options) for g in range(groups)]
    scores = [jax.lax.dot_general(q[g], key, (((1,), (1,)), ((), ())), **options) for g, (key, _) in enumerate(stored)]
    if rule.cap_factor is not None:
        scores = [jnp.tanh(s * rule.cap_factor) for s in scores]
    if masked:
        visible = _visible(layout, span, index, rows)
        scores = [jnp.where(visible, s, -jnp.inf) for s in scores]
    before = [highest[g] for g in range(groups)]
    after = [jnp.maximum(old, s.max(axis=1, keepdims=True)) for old, s in zip(before, scores, strict=True)]
    weights = [jnp.exp2((s - _spread(m, keys)) * rule.factor) for s, m in zip(scores, after, strict=True)]
    shrink = [jnp.exp2((old - new) * rule.factor) for old, new in zip(before, after, strict=True)]
    for g, (_, value) in enumerate(stored):
        tiles = [weights[g][:, lane : lane + LANES] for lane in range(0, keys, LANES)]
        total[g] = total[g] * shrink[g] + sum(tiles[1:], tiles[0])
        highest[g] = after[g]
        update = jnp.dot(weights[g].astype(value.dtype), value, **options)
        sums[g] = sums[g] * _spread(shrink[g], layout.value_dim) + update


def _keys_and_values(layout: _Layout, buffers, slot, expansion, group: int, options):
    """A group's keys [S, d] and values [S, dv] of a block."""
    dim, value_dim = layout.dim, layout.value_dim
    if expansion is None:
        keys = buffers[0][slot, :, group * dim : (group + 1) * dim]
        return keys, buffers[-1][slot, :, group * value_dim : (group + 1) * value_dim]
    rank = expansion.shape[1]
    latents = buffers[0][slot, :, :rank]
    both = jnp.dot(latents, expansion[group], **options).astype(latents.dtype)
    own = both.shape[1] - value_dim
    keys = both[:, :own]
    if dim > own:
        keys = jnp.concatenate([keys, buffers[0][slot, :, rank:]], axis=1)
    return keys, both[:, own:]


def _visible(layout: _Layout, span: _Span, index, rows: int):
    """Which keys of a block each row sees [R, S]."""
    keys, tokens, window = layout.keys, layout.plan.tokens, layout.rule.window
    start = span.begin + index * keys
    position = start + jax.lax.broadcasted_iota(jnp.int32, (rows, keys), 1)
    token = jax.lax.broadcasted_iota(jnp.int32, (rows, keys), 0) & (tokens - 1)
    query = span.first + token
    visible = position <= jnp.minimum(query, span.end - 1)
    return visible if window is None else visible & (position > query - window)


def _spread(x: Float[Array, "R 128"], width: int) -> Float[Array, "R width"]:
    """Rows of equal lanes, in another width."""
    tiles = jnp.concatenate([x] * pl.cdiv(width, LANES), axis=1)
    return tiles if tiles.shape[1] == width else tiles[:, :width]

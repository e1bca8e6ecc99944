"""Causal softmax attention over paged rows on TPU, for queries of a few heads that share their keys.

A grid step has the queries of some tokens of one sequence and goes through the blocks of keys that they see. Blocks
after the last token or before a window are neither fetched nor computed. A group of heads with the same keys, times the
step's tokens, are the rows of one matrix. Maximum, sum and accumulator are float32 (Milakov and Gimelshein 2018).
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

from pallas_kernels import chosen_words_tpu
from pallas_kernels.paged_fetch_tpu import LANES, TABLE_BYTES, Blocks, Fetch, Span

LOG2_E = math.log2(math.e)
VMEM_BYTES = 48 << 20
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
    choice: Int[Array, "B N _ 128"] | None = None,
    whole_pages: Int[Array, "B V"] | None = None,
    pieces: int = 1,
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
      choice: in place of causality and a window, what `chosen_words_tpu` packs for as many keys as blocks have.
      whole_pages: `page_table` numbers the pages of each sequence that are read, `pieces` to a page of this table.
    """
    batch, blocks, groups, rows, dim = q.shape
    page, width = k_pages.shape[2], page_table.shape[1]
    tables = [page_table] if whole_pages is None else [page_table, whole_pages]
    fitting = TABLE_BYTES // (4 * sum(x.shape[1] for x in tables))
    if batch > fitting:
        some = [slice(first, first + fitting) for first in range(0, batch, fitting)]
        outs = [
            attend(
                q[part], k_pages, v_pages, layer, page_table[part], starts[part], lengths[part], plan, rule,
                value_dim=value_dim, together=together, sinks=sinks, expansion=expansion,
                choice=None if choice is None else choice[part],
                whole_pages=None if whole_pages is None else whole_pages[part], pieces=pieces,
                name=name, interpret=interpret,
            )
            for part in some
        ]  # fmt: skip
        return jnp.concatenate(outs)
    parts, keyed = groups // plan.groups, Blocks(page, plan.pages, width, pieces, tables[-1].shape[1])
    # Rows are shared out between two cores, where a chip has two. Each core fetches ahead for itself.
    steps = batch * parts * blocks
    cores = 2 if steps % 2 == 0 else 1
    layout = _Layout(steps // cores, parts, blocks, plan, rule, keyed, together, together * dim, together * value_dim)
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
    beside = [] if choice is None else [choice.reshape(batch * blocks, *choice.shape[2:])]
    words = chosen_words_tpu.rows(plan.tokens) * keyed.keys // LANES
    widths = [x.shape[3] // (1 if shared else parts) for x in pages]
    most = width * page
    if rule.window is not None:
        most = min(most, pl.cdiv(rule.window + plan.tokens - 1, page) * page)
    reach = batch * blocks * most
    kept = _Kept(len(tables), sinks is not None, shared, len(pages), len(beside))
    return pl.pallas_call(
        lambda *refs: _kernel(layout, kept, *refs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3 + len(tables),
            grid=(cores, layout.steps),
            in_specs=[*specs, *[pl.BlockSpec(memory_space=pl.ANY)] * (len(pages) + len(beside))],
            out_specs=pl.BlockSpec((None, None, plan.groups, rows, value_dim), place),
            scratch_shapes=[
                *(pltpu.VMEM((2, keyed.keys, each), k_pages.dtype) for each in widths),
                *(pltpu.VMEM((2, words, LANES), jnp.int32) for _ in beside),
                pltpu.VMEM((plan.groups, rows, LANES), jnp.float32),
                pltpu.VMEM((plan.groups, rows, LANES), jnp.float32),
                pltpu.VMEM((plan.groups, rows, layout.value_dim), jnp.float32),
                *([pltpu.VMEM((plan.groups, rows, layout.dim), q.dtype)] if together > 1 else []),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA((len(pages) + len(beside), 2)),
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
            + q.size * q.dtype.itemsize * (dim + value_dim) // dim
            + parts * sum(x.size * x.dtype.itemsize for x in beside),
        ),
        interpret=interpret,
        name=name,
    )(
        jnp.asarray(layer, jnp.int32).reshape(1),
        *(x.astype(jnp.int32) for x in (starts, lengths)),
        *(x.astype(jnp.int32).reshape(-1) for x in tables),
        *operands,
        *pages,
        *beside,
    )


@dataclass(frozen=True)
class _Layout:
    """Static figures of a call: grid steps of a core, parts of the groups, blocks of tokens and keys, and the above."""

    steps: int
    parts: int
    blocks: int
    plan: Plan
    rule: Rules
    keyed: Blocks
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


def _span(layout: _Layout, starts, lengths, step) -> tuple[Any, Span]:
    """The position of a grid step's first query, and the keys that it goes through."""
    row, part, block = layout.place(step)
    tokens, window, page = layout.plan.tokens, layout.rule.window, jnp.int32(layout.keyed.page)
    before = block * tokens
    first = starts[row] + before
    real = jnp.clip(lengths[row] - before, 0, tokens)
    end = jnp.where(real > 0, first + real, 0)
    reach = 0 if window is None else jax.lax.div(jnp.maximum(first - window + 1, 0), page) * page
    number = row * layout.blocks + block
    return first, layout.keyed.span(row, part, jnp.where(real > 0, reach, 0), end, number)


class _Kept(NamedTuple):
    """How many of its operands a call has."""

    tables: int
    sinks: bool
    expansion: bool
    pages: int
    choices: int


def _kernel(layout: _Layout, kept: _Kept, layer, starts, lengths, *refs):
    """Blocks: q, out [g, R, d]; sinks, highest, total [g, R, 128], of which total has lanes still to be added up;
    expansion [g, r, _];
    sums [g, R, c dv]; wide [g, R, c d]; buffers [2, S, g c d], and of a choice [2, _, 128]."""
    tables, q, refs = refs[: kept.tables], refs[kept.tables], refs[kept.tables + 1 :]
    sinks, refs = (refs[0], refs[1:]) if kept.sinks else (None, refs)
    expansion, refs = (refs[0], refs[1:]) if kept.expansion else (None, refs)
    arrays, every = kept.pages, kept.pages + kept.choices
    sources, out, buffers = refs[:every], refs[every], refs[every + 1 : 2 * every + 1]
    highest, total, sums, *wide, kept_slot, semaphores = refs[2 * every + 1 :]
    buffers, choice = buffers[:arrays], buffers[arrays] if kept.choices else None
    step = pl.program_id(1)
    number = pl.program_id(0) * layout.steps + step
    beside = (sources[arrays], choice) if kept.choices else None
    fetch = Fetch(layout.keyed, layer[0], tables, sources[:arrays], buffers, semaphores, beside)
    first, span = _span(layout, starts, lengths, number)
    following = _span(layout, starts, lengths, jnp.minimum(number + 1, pl.num_programs(0) * layout.steps - 1))[1]

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
        attend = functools.partial(_attend_block, layout, slot, q, buffers, expansion, highest, total, sums)
        start = span.begin + index * layout.keyed.keys

        def attend_some():
            _clear_after(buffers[-1], slot, span.end - start)
            rows = q.shape[1]
            if choice is not None:
                attend(chosen_words_tpu.unpack(choice, slot, layout.plan.tokens, rows))
            else:
                attend(_visible(layout, first, span.end, start, rows))

        if layout.plan.tokens == 1 or choice is not None:
            attend_some()
            return
        all_seen = start + layout.keyed.keys <= jnp.minimum(first + 1, span.end)
        if layout.rule.window is not None:
            all_seen &= start > first + layout.plan.tokens - 1 - layout.rule.window
        pl.when(all_seen)(lambda: attend(None))
        pl.when(jnp.logical_not(all_seen))(attend_some)

    kept_slot[0] = fetch.through(span, following, step + 1 == layout.steps, kept_slot[0], block)
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


def _attend_block(layout: _Layout, slot, q, buffers, expansion, highest, total, sums, visible) -> None:
    """One block; `visible` [R, S], or None if all of it is."""
    groups = q.shape[0]
    keys, rule = layout.keyed.keys, layout.rule
    options: Any = {"preferred_element_type": jnp.float32}
    if q.dtype == jnp.float32:
        options["precision"] = "highest"
    # Every step for all groups before the next one: a product's result comes long after it was asked for.
    stored = [_keys_and_values(layout, buffers, slot, expansion, g, options) for g in range(groups)]
    scores = [jax.lax.dot_general(q[g], key, (((1,), (1,)), ((), ())), **options) for g, (key, _) in enumerate(stored)]
    if rule.cap_factor is not None:
        scores = [jnp.tanh(s * rule.cap_factor) for s in scores]
    if visible is not None:
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


def _visible(layout: _Layout, first, end, start, rows: int):
    """Which keys of a block that begins at `start` each row sees [R, S]."""
    keys, tokens, window = layout.keyed.keys, layout.plan.tokens, layout.rule.window
    position = start + jax.lax.broadcasted_iota(jnp.int32, (rows, keys), 1)
    token = jax.lax.broadcasted_iota(jnp.int32, (rows, keys), 0) & (tokens - 1)
    query = first + token
    visible = position <= jnp.minimum(query, end - 1)
    return visible if window is None else visible & (position > query - window)


def _spread(x: Float[Array, "R 128"], width: int) -> Float[Array, "R width"]:
    """Rows of equal lanes, in another width."""
    tiles = jnp.concatenate([x] * pl.cdiv(width, LANES), axis=1)
    return tiles if tiles.shape[1] == width else tiles[:, :width]

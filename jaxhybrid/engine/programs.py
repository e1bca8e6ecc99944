"""The compiled programs: pure functions of (parameters, pool, batch) that return the pool they were given."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxhybrid.engine.sampling import SamplingControls, SamplingMode, choose_tokens
from jaxhybrid.layers.decoder import Decoder
from jaxhybrid.layers.step import MediaInputs
from jaxhybrid.model import Model
from jaxhybrid.platform import compiler_options
from jaxhybrid.state.arrays import PoolArrays
from jaxhybrid.state.batch import BatchAddress


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeOutput:
    """Of a decode loop of S steps: row b processed `tokens[b, :made[b]]`.

    Where `stopped[b]`, `tokens[b, made[b]]` is the stop token it sampled and did not process. `log_probs` are of the
    model's own distribution, before penalties, temperature and filters.
    """

    tokens: Int[Array, "B S"]
    log_probs: Float[Array, "B S"]
    made: Int[Array, " B"]
    stopped: Bool[Array, " B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Loop:
    step: Int[Array, ""]
    pool: PoolArrays
    logits: Float[Array, "B V"]
    address: BatchAddress
    live: Bool[Array, " B"]
    output: DecodeOutput
    seen: Int[Array, "B V"] | None
    made: Int[Array, "B V"] | None


def prefill(
    graph: nnx.GraphDef,
    parameters: nnx.State,
    pool: PoolArrays,
    tokens: Int[Array, "B C"],
    address: BatchAddress,
    media: MediaInputs | None,
) -> PoolArrays:
    """Advances each row by its `address.lengths` tokens; the next token's logits go with the row's state."""
    decoder: Decoder = nnx.merge(graph, parameters)
    outputs, pool = decoder.trunk(tokens, pool, address, media)
    last = jnp.take_along_axis(outputs, jnp.maximum(address.lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    return _keep_logits(pool, decoder.logits(last), address)


def score(
    graph: nnx.GraphDef,
    parameters: nnx.State,
    pool: PoolArrays,
    tokens: Int[Array, "B C"],
    address: BatchAddress,
) -> tuple[Float[Array, "B C"], PoolArrays]:
    """As `prefill`, and the log-probability of every token given all before it."""
    decoder: Decoder = nnx.merge(graph, parameters)
    first = pool["output"]["logits"][0, address.read_slots]
    outputs, pool = decoder.trunk(tokens, pool, address)
    logits = decoder.logits(outputs)
    before = jnp.concatenate([first[:, None], logits[:, :-1]], axis=1)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(before), tokens[..., None], axis=-1)[..., 0]
    last = jnp.take_along_axis(logits, jnp.maximum(address.lengths - 1, 0)[:, None, None], axis=1)[:, 0]
    return log_probs, _keep_logits(pool, last, address)


def decode(
    graph: nnx.GraphDef,
    steps: int,
    mode: SamplingMode,
    parameters: nnx.State,
    pool: PoolArrays,
    address: BatchAddress,
    budget: Int[Array, " B"],
    forced: Int[Array, "B S"],
    controls: SamplingControls,
    counts: tuple[Int[Array, "B V"], Int[Array, "B V"]] | None,
) -> tuple[DecodeOutput, PoolArrays]:
    """Up to `steps` tokens per row, chosen and processed on the device.

    `budget[b]` bounds the tokens of row b (0 for padding). `forced[b, i]` >= 0 is taken instead of a choice, and is not
    checked against stop tokens. `counts`: how often each token was seen and made so far, for penalties.
    """
    decoder: Decoder = nnx.merge(graph, parameters)
    rows = budget.shape[0]
    empty = DecodeOutput(
        tokens=jnp.full((rows, steps), -1, jnp.int32),
        log_probs=jnp.zeros((rows, steps), jnp.float32),
        made=jnp.zeros(rows, jnp.int32),
        stopped=jnp.zeros(rows, jnp.bool_),
    )
    seen, made = counts if counts is not None else (None, None)

    def body(loop: _Loop) -> _Loop:
        wanted = forced[:, loop.step]
        choices = loop.logits
        if decoder.config.vision is not None:  # no text has an image's placeholder in it
            choices = choices.at[:, decoder.config.vision.placeholder_ids].set(-jnp.inf)
        token = choose_tokens(choices, controls, mode, loop.address.starts, loop.seen, loop.made)
        token = jnp.where(wanted >= 0, wanted, token)
        stops = loop.live & (wanted < 0) & (token[:, None] == controls.stop_token_ids).any(axis=1)
        # Done with these logits, so that the next ones can take their place.
        token, output = jax.lax.optimization_barrier((token, _record(loop, token, stops)))
        going = loop.live & ~stops
        address = _only(loop.address, going)
        hidden, pool = decoder.trunk(jnp.where(going, token, 0)[:, None], loop.pool, address)
        logits = jnp.where(going[:, None], decoder.logits(hidden[:, 0]), loop.logits)
        output = replace(output, made=output.made + going)
        counted = [_count(count, token, going) for count in (loop.seen, loop.made)]
        after = replace(
            loop.address,
            starts=loop.address.starts + going,
            read_slots=jnp.where(going, loop.address.write_slots, loop.address.read_slots),
        )
        return _Loop(loop.step + 1, pool, logits, after, going & (output.made < budget), output, *counted)

    # Logits are the loop's own meanwhile: XLA would copy those of all slots at every step on a TPU.
    logits = pool["output"]["logits"][0, address.read_slots]
    start = _Loop(jnp.int32(0), pool, logits, address, budget > 0, empty, seen, made)
    end = jax.lax.while_loop(lambda loop: (loop.step < steps) & loop.live.any(), body, start)
    return end.output, _keep_logits(end.pool, end.logits, _only(end.address, end.output.made > 0))


def _record(loop: _Loop, token: Int[Array, " B"], stops: Bool[Array, " B"]) -> DecodeOutput:
    log_prob = jnp.take_along_axis(jax.nn.log_softmax(loop.logits), token[:, None], axis=-1)[:, 0]
    output = loop.output
    return replace(
        output,
        tokens=output.tokens.at[:, loop.step].set(jnp.where(loop.live, token, -1)),
        log_probs=output.log_probs.at[:, loop.step].set(jnp.where(loop.live, log_prob, 0.0)),
        stopped=output.stopped | stops,
    )


def _only(address: BatchAddress, going: Bool[Array, " B"]) -> BatchAddress:
    """One token for the rows still going; the others become padding."""
    return replace(
        address,
        lengths=going.astype(jnp.int32),
        read_slots=jnp.where(going, address.read_slots, 0),
        write_slots=jnp.where(going, address.write_slots, 0),
    )


def _count(
    counts: Int[Array, "B V"] | None, token: Int[Array, " B"], going: Bool[Array, " B"]
) -> Int[Array, "B V"] | None:
    if counts is None:
        return None
    return counts.at[jnp.arange(token.shape[0]), token].add(going.astype(counts.dtype))


def _keep_logits(pool: PoolArrays, logits: Float[Array, "B V"], address: BatchAddress) -> PoolArrays:
    kept = pool["output"]["logits"].at[0, address.write_slots].set(logits)
    return {**pool, "output": {"logits": kept}}


def copy_pages(
    paged: frozenset[tuple[str, str]], pool: PoolArrays, source: Int[Array, " N"], target: Int[Array, " N"]
) -> PoolArrays:
    """Copies whole pages of every token-indexed leaf (named in `paged`)."""
    return {
        group: {
            name: leaf.at[:, target].set(leaf[:, source]) if (group, name) in paged else leaf
            for name, leaf in leaves.items()
        }
        for group, leaves in pool.items()
    }


def read_logits(pool: PoolArrays, slots: Int[Array, " N"]) -> Float[Array, "N V"]:
    return pool["output"]["logits"][0, slots]


class Programs:
    """Compiles each program once for each shape it is asked for, and counts what it compiled."""

    def __init__(self, model: Model) -> None:
        self._parameters = model.parameters
        self._graph = model.graph
        self._paged = frozenset((leaf.group, leaf.name) for leaf in model.layout.paged)
        self._pool = model.pool_places
        self._compiled: dict[Hashable, Any] = {}

    @property
    def count(self) -> int:
        return len(self._compiled)

    def prefill(
        self,
        pool: PoolArrays,
        tokens: Int[np.ndarray, "B C"],
        address: BatchAddress,
        media: MediaInputs | None = None,
    ) -> PoolArrays:
        function = partial(prefill, self._graph)
        key = ("prefill", tokens.shape, media is not None)
        return self._run(key, function, 1, self._pool, self._parameters, pool, tokens, address, media)

    def score(
        self, pool: PoolArrays, tokens: Int[np.ndarray, "B C"], address: BatchAddress
    ) -> tuple[Float[Array, "B C"], PoolArrays]:
        function = partial(score, self._graph)
        out = (None, self._pool)
        return self._run(("score", tokens.shape), function, 1, out, self._parameters, pool, tokens, address)

    def decode(
        self,
        pool: PoolArrays,
        address: BatchAddress,
        mode: SamplingMode,
        budget: Int[np.ndarray, " B"],
        forced: Int[np.ndarray, "B S"],
        controls: SamplingControls,
        counts: tuple[Int[np.ndarray, "B V"], Int[np.ndarray, "B V"]] | None,
    ) -> tuple[DecodeOutput, PoolArrays]:
        function = partial(decode, self._graph, forced.shape[1], mode)
        key = ("decode", forced.shape, controls.stop_token_ids.shape, mode)
        batch = (address, budget, forced, controls, counts)
        return self._run(key, function, 1, (None, self._pool), self._parameters, pool, *batch)

    def copy_pages(self, pool: PoolArrays, source: Int[np.ndarray, " N"], target: Int[np.ndarray, " N"]) -> PoolArrays:
        function = partial(copy_pages, self._paged)
        return self._run(("copy_pages", source.shape), function, 0, self._pool, pool, source, target)

    def read_logits(self, pool: PoolArrays, slots: Int[np.ndarray, " N"]) -> Float[Array, "N V"]:
        return self._run(("read_logits", slots.shape), read_logits, None, None, pool, slots)

    def _run(self, key: Hashable, function: Callable, donated: int | None, out_shardings: Any, *arguments: Any) -> Any:
        """`out_shardings`: on a mesh the pool comes back as it went in; None leaves a result to the compiler."""
        program = self._compiled.get(key)
        if program is None:
            donate = () if donated is None else donated
            jitted = jax.jit(function, donate_argnums=donate, out_shardings=out_shardings)
            program = self._compiled[key] = jitted.lower(*arguments).compile(compiler_options(jax.default_backend()))
        return program(*arguments)

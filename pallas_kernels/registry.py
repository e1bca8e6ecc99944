"""Operators and their implementations: which one runs, and a record of what ran and why.

An operator lists its implementations in order of preference. `choose` takes the first that this platform has and that
accepts the call's shapes, unless a kind is forced, by the environment variable `JAXHYBRID_KERNELS` (read once, at
import) or by `force`. The choice is made while a program is traced; `force` and `target` are part of JAX's compilation
cache key, so a compiled function is traced again under another forced kind or for another platform.

On an accelerator no call takes a slow path in silence: where a kernel of the platform refuses a call, that is counted,
and a `KernelFallbackWarning` says why.

On a mesh (see `partition`) an operator that names its axes is split by them, and the choice is what one device runs.
"""

import contextlib
import contextvars
import os
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from pallas_kernels.partition import Axes, current, split

KINDS = ("pallas", "xla", "reference")
ACCELERATORS = ("tpu", "gpu")


class KernelUnavailableError(NotImplementedError):
    """An operator has no implementation of the kind asked for that can run this call on this platform."""


class KernelFallbackWarning(UserWarning):
    """An accelerator's kernel refused a call, which now takes a slower path."""


def accept_all(*arguments: Any, **options: Any) -> str | None:
    """The `accepts` of an implementation without restrictions."""
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operator.

    `accepts` sees the call's arguments and returns None, or why this implementation cannot run them (as a clause:
    "head_dim 80 is not a multiple of 128"). `platforms` empty means any platform of `jax.default_backend()`.
    `automatic=False` keeps it for callers that force it: the reference, which is slow, for example.
    """

    kind: str
    function: Callable[..., Any]
    platforms: tuple[str, ...] = ()
    accepts: Callable[..., str | None] = accept_all
    automatic: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"implementation kind: expected one of {', '.join(KINDS)}, got {self.kind!r}")


@dataclass(frozen=True)
class Operator:
    """A public function's name and its implementations, the preferred first.

    `axes`: how a call is shared out on a mesh; without it the compiler decides.
    """

    name: str
    implementations: tuple[Implementation, ...]
    axes: Axes | None = None


@dataclass(frozen=True)
class Choice:
    """What one call of an operator got. `fallback`: a preferred kernel of this platform refused the call's shapes."""

    operator: str
    implementation: str
    reason: str
    shapes: str
    fallback: bool


class Recorder:
    """Counts choices. Each distinct choice is kept once, however often it was made."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Choice] = Counter()

    def add(self, choice: Choice) -> bool:
        """Count one more such choice. True if it is the first."""
        with self._lock:
            self._counts[choice] += 1
            return self._counts[choice] == 1

    def choices(self) -> list[Choice]:
        """Distinct choices in the order in which they were first made."""
        with self._lock:
            return list(self._counts)

    def counts(self) -> dict[Choice, int]:
        """How often each was made: once per traced call, not per execution of a compiled program."""
        with self._lock:
            return dict(self._counts)

    def fallbacks(self) -> dict[str, int]:
        """Per operator, how many calls did not get the kernel that this platform prefers."""
        totals: Counter[str] = Counter()
        for choice, count in self.counts().items():
            if choice.fallback:
                totals[choice.operator] += count
        return dict(totals)


# The one process-wide recorder, used wherever `record` has not put another in its place.
_recorder: contextvars.ContextVar[Recorder] = contextvars.ContextVar("pallas_kernels_recorder", default=Recorder())  # noqa: B039


def recorder() -> Recorder:
    """The recorder that choices go to here: the innermost `record` block's, else the process's."""
    return _recorder.get()


@contextlib.contextmanager
def record() -> Iterator[Recorder]:
    """Send the choices made in this block to a recorder of its own."""
    own = Recorder()
    token = _recorder.set(own)
    try:
        yield own
    finally:
        _recorder.reset(token)


# ((operator name or "", kind), ...): the last matching entry wins; "" matches every operator.
_Forced = tuple[tuple[str, str], ...]


def forced_by_environment(environment: Mapping[str, str]) -> _Forced:
    """What `JAXHYBRID_KERNELS` asks for. Raises ValueError for an unknown kind."""
    kind = environment.get("JAXHYBRID_KERNELS", "")
    return (("", _known(kind, "JAXHYBRID_KERNELS")),) if kind else ()


def _known(kind: str, source: str) -> str:
    if kind not in KINDS:
        raise ValueError(f"{source}: expected one of {', '.join(KINDS)}, got {kind!r}")
    return kind


_ENVIRONMENT = forced_by_environment(os.environ)
_forced = jax.make_user_context(default_value=_ENVIRONMENT)


@contextlib.contextmanager
def force(kind: str, operator: str | None = None) -> Iterator[None]:
    """Use implementations of this kind (`reference`, `xla`, `pallas`) in this block.

    With `operator`, only that operator is forced. A call whose operator has none that can run raises
    `KernelUnavailableError`; an unknown kind raises ValueError.
    """
    with _forced((*_forced.value, (operator or "", _known(kind, "force")))):
        yield


_target: Any = jax.make_user_context(default_value="")


@contextlib.contextmanager
def target(platform: str) -> Iterator[None]:
    """Choose for programs that will run on this platform (`cpu`, `tpu`, `gpu`), not on the one at hand.

    For compiling ahead of time, and to see what a platform would get.
    """
    with _target(platform):
        yield


def current_platform() -> str:
    """`cpu`, `tpu` or `gpu`: what programs that are traced here will run on."""
    return _target.value or jax.default_backend()


def choose(operator: Operator, *arguments: Any, **options: Any) -> Callable[..., Any]:
    """The function to call with these arguments, recorded with the reason.

    Raises `KernelUnavailableError`, with each implementation's reason, if a kind is forced that cannot run the call,
    or if nothing can.
    """
    if operator.axes is not None and current() is not None:
        return split(lambda *parts, **rest: choose(operator, *parts, **rest)(*parts, **rest), operator.axes)
    platform = current_platform()
    forced = next((kind for name, kind in reversed(_forced.value) if name in ("", operator.name)), None)
    shapes = _summary(arguments)
    refusals: list[str] = []
    fallback = False
    for implementation in operator.implementations:
        if forced is None and not implementation.automatic:
            continue
        if forced is not None and implementation.kind != forced:
            continue
        if implementation.platforms and platform not in implementation.platforms:
            refusals.append(f"{implementation.kind} needs {' or '.join(implementation.platforms)}")
            continue
        refusal = implementation.accepts(*arguments, **options)
        if refusal is not None:
            refusals.append(f"{implementation.kind}: {refusal}")
            fallback = True
            continue
        why = "forced" if forced else f"first that runs on {platform}"
        reason = "; ".join([why, *refusals])
        first = recorder().add(Choice(operator.name, implementation.kind, reason, shapes, fallback))
        if first and fallback and platform in ACCELERATORS:
            message = f"{operator.name} runs as {implementation.kind} for {shapes} ({reason})"
            warnings.warn(message, KernelFallbackWarning, stacklevel=3)
        return implementation.function
    has = ", ".join(dict.fromkeys(implementation.kind for implementation in operator.implementations))
    raise KernelUnavailableError(
        f"{operator.name}: expected {forced or 'any'} implementation for {shapes} on {platform}, "
        f"got none ({'; '.join(refusals) or f'it has {has}'})"
    )


def _summary(arguments: tuple[Any, ...]) -> str:
    """`f32[2,3,4] f32[8,5]`: dtype and shape of the array arguments; a tuple of n arrays is `n x` its first."""
    return " ".join(text for text in map(_array_summary, arguments) if text)


def _array_summary(value: Any) -> str:
    if isinstance(value, tuple) and value:
        return f"{len(value)}x{_array_summary(value[0])}"
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return ""
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"

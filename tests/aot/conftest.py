"""Shared by the tests that compile for parts this machine does not have."""

import jax
import pytest

from pallas_kernels import aot


@pytest.fixture(params=[part.name for part in aot.TPUS])
def tpu(request: pytest.FixtureRequest) -> aot.Part:
    """Each TPU in turn; skips where its compiler is not installed."""
    return installed(request.param)


@pytest.fixture(params=[part.name for part in aot.GPUS])
def gpu(request: pytest.FixtureRequest) -> aot.Part:
    """Each GPU in turn; skips where its compiler is not installed."""
    return installed(request.param)


def installed(name: str) -> aot.Part:
    part = aot.PARTS[name]
    if reason := aot.why_absent(part):
        pytest.skip(reason)
    return part


@pytest.fixture(autouse=True)
def _no_cache_of_programs():
    """A program from the cache proves nothing."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", before)

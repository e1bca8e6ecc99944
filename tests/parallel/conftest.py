"""Tests on eight simulated devices, which a process must ask for before jax starts: `make mesh` does."""

import pytest


@pytest.fixture(autouse=True)
def eight_devices() -> None:
    import jax

    if jax.device_count() < 8:
        pytest.skip("needs 8 devices: XLA_FLAGS=--xla_force_host_platform_device_count=8")

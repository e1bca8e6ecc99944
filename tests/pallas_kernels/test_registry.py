import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import registry
from pallas_kernels.registry import Choice, Implementation, KernelFallbackWarning, KernelUnavailableError, Operator


def plus(amount):
    return lambda x: x + amount


def at_most(limit):
    return lambda x: None if x.shape[0] <= limit else f"{x.shape[0]} rows, at most {limit}"


@pytest.fixture
def operator():
    return Operator(
        "add",
        (
            Implementation("pallas", plus(100), platforms=("tpu",)),
            Implementation("xla", plus(10), accepts=at_most(4)),
            Implementation("xla", plus(20)),
            Implementation("reference", plus(1), automatic=False),
        ),
    )


def run(operator, rows=3):
    x = jnp.zeros((rows, 2))
    return int(registry.choose(operator, x)(x)[0, 0])


def test_first_that_runs_here_is_chosen_and_recorded(operator):
    with registry.record() as recorder:
        assert run(operator) == 10
        assert run(operator) == 10
    (choice,) = recorder.choices()
    assert choice == Choice("add", "xla", "first that runs on cpu; pallas needs tpu", "float32[3,2]", fallback=False)
    assert recorder.counts()[choice] == 2
    assert recorder.fallbacks() == {}


def test_refused_shape_falls_back_and_is_counted(operator):
    with registry.record() as recorder:
        assert run(operator, rows=7) == 20
    assert recorder.fallbacks() == {"add": 1}
    assert "xla: 7 rows, at most 4" in recorder.choices()[0].reason


def test_record_blocks_nest_and_leave_the_outer_alone(operator):
    with registry.record() as outer:
        with registry.record() as inner:
            run(operator)
        assert registry.recorder() is outer
    assert len(inner.choices()) == 1
    assert outer.choices() == []


def test_force_by_kind_and_by_operator(operator):
    with registry.force("reference"):
        assert run(operator) == 1
        with registry.force("xla", operator="add"):
            assert run(operator) == 10
        with registry.force("xla", operator="other"):
            assert run(operator) == 1
    assert run(operator) == 10


def test_forcing_what_is_not_there_says_why(operator):
    with registry.force("pallas"), pytest.raises(KernelUnavailableError, match=r"add: .*pallas.* on cpu.*needs tpu"):
        run(operator)
    picky = Operator(
        "picky", (Implementation("xla", plus(1), accepts=at_most(4)), Implementation("reference", plus(1)))
    )
    with registry.force("xla"), pytest.raises(KernelUnavailableError, match="7 rows, at most 4"):
        run(picky, rows=7)
    bare = Operator("bare", (Implementation("xla", plus(1)),))
    with registry.force("reference"), pytest.raises(KernelUnavailableError, match="it has xla"):
        run(bare)
    with pytest.raises(ValueError, match=r"force: expected one of .*'fast'"), registry.force("fast"):
        pass


def test_nothing_automatic_is_an_error():
    only_reference = Operator("slow", (Implementation("reference", plus(1), automatic=False),))
    with pytest.raises(KernelUnavailableError, match="slow: expected any implementation"):
        run(only_reference)


def test_force_retraces_a_jitted_function(operator):
    compiled = jax.jit(lambda x: registry.choose(operator, x)(x))
    x = jnp.zeros((3, 2))
    assert int(compiled(x)[0, 0]) == 10
    with registry.force("reference"):
        assert int(compiled(x)[0, 0]) == 1
    assert int(compiled(x)[0, 0]) == 10


def test_target_chooses_for_another_platform_and_retraces(operator):
    compiled = jax.jit(lambda x: registry.choose(operator, x)(x))
    x = jnp.zeros((3, 2))
    assert int(compiled(x)[0, 0]) == 10
    with registry.target("tpu"):
        assert int(compiled(x)[0, 0]) == 100
    assert int(compiled(x)[0, 0]) == 10


def test_a_fallback_on_an_accelerator_warns_once_and_counts_always():
    operator = Operator(
        "add",
        (Implementation("pallas", plus(100), platforms=("tpu",), accepts=at_most(4)), Implementation("xla", plus(10))),
    )
    with registry.record() as recorder, registry.target("tpu"):
        with pytest.warns(
            KernelFallbackWarning, match=r"add runs as xla for float32\[7,2\].*pallas: 7 rows, at most 4"
        ):
            run(operator, rows=7)
        run(operator, rows=7)
        run(operator)
    assert recorder.fallbacks() == {"add": 2}
    with registry.record(), registry.target("cpu"):
        run(operator, rows=7)


def test_environment_is_validated():
    assert registry.forced_by_environment({}) == ()
    assert registry.forced_by_environment({"JAXHYBRID_KERNELS": "xla"}) == (("", "xla"),)
    with pytest.raises(ValueError, match=r"JAXHYBRID_KERNELS: expected one of .*'cuda'"):
        registry.forced_by_environment({"JAXHYBRID_KERNELS": "cuda"})


def test_unknown_kind_is_refused():
    with pytest.raises(ValueError, match=r"expected one of .*'triton'"):
        Implementation("triton", plus(1))


def test_summary_of_tuples_of_arrays():
    both = Operator("both", (Implementation("xla", lambda *_: 0),))
    with registry.record() as recorder:
        registry.choose(both, jnp.zeros((3, 2), jnp.int32), (jnp.zeros(4), jnp.zeros(4)), 7)
    assert recorder.choices()[0].shapes == "int32[3,2] 2xfloat32[4]"

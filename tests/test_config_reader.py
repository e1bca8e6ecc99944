"""Published configurations are read key by key; whatever nobody reads, or nothing implements, is named."""

import pytest

from jaxhybrid.config import DynamicScaling, LinearScaling, Llama3Scaling, RopeScaling, RopeSpec, YarnScaling
from jaxhybrid.config_reader import GENERIC_KEYS, INERT_KEYS, NEUTRAL_VALUES, ConfigReader, end_tokens
from jaxhybrid.errors import ConfigError
from jaxhybrid.models.rope_keys import rope_spec

WHERE = "folder/config.json"


def reader(**values: object) -> ConfigReader:
    return ConfigReader(values, WHERE)


def refused(action, *arguments, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        action(*arguments, **options)
    return str(caught.value)


def test_a_key_is_taken_once() -> None:
    read = reader(width=3)
    assert read.take("width") == 3
    assert refused(read.take, "width") == f"{WHERE}: expected key 'width', found none"


def test_a_missing_key_has_its_default_or_is_named_in_all_spellings() -> None:
    assert reader().take("width", default=None) is None
    assert refused(reader().take, "num_experts", "n_experts") == (
        f"{WHERE}: expected key 'num_experts' or 'n_experts', found none"
    )


def test_spellings_of_one_thing_must_agree() -> None:
    read = reader(n_experts=4, num_experts=4)
    assert read.take("num_experts", "n_experts") == 4
    read.finish()
    message = refused(reader(n_experts=5, num_experts=4).take, "num_experts", "n_experts")
    assert message == f"{WHERE}: num_experts=4 contradicts n_experts=5"


def test_an_option_must_be_one_of_those_implemented() -> None:
    reader(hidden_act="silu").require("hidden_act", "silu")
    reader().require("hidden_act", "silu")
    reader(flag=False).require("flag", True, False)
    message = refused(reader(hidden_act="gelu").require, "hidden_act", "silu", "swish")
    assert message == f"{WHERE}: hidden_act='gelu' is not supported, expected 'silu' or 'swish'"
    assert "heads=4" in refused(reader(heads=4).require, "heads", 8, default=8)


def test_keys_that_nobody_took_are_named_unless_they_change_no_forward_pass() -> None:
    read = reader(width=3, sparse_window=1, attention_dropout=0.1, another=2, torch_dtype="bfloat16")
    read.take("width")
    assert refused(read.finish) == f"{WHERE}: unknown keys another, sparse_window: what they change is not known"
    assert "width" not in INERT_KEYS


def test_generic_keys_may_have_any_value() -> None:
    reader(temperature=0.6, num_beams=4, bad_words_ids=[[3]], torchscript=True).finish()
    assert not INERT_KEYS & NEUTRAL_VALUES.keys()
    assert GENERIC_KEYS < INERT_KEYS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("is_decoder", True),
        ("is_encoder_decoder", True),
        ("tie_encoder_decoder", True),
        ("add_cross_attention", True),
        ("cross_attention_hidden_size", 32),
        ("pruned_heads", {"1": [0, 2]}),
        ("chunk_size_feed_forward", 4),
    ],
)
def test_a_generic_key_that_changes_nothing_at_one_value_is_refused_at_others(name: str, value: object) -> None:
    neutral = NEUTRAL_VALUES[name]
    reader(**{name: neutral}).finish()
    message = refused(reader(**{name: value}).finish)
    assert message == f"{WHERE}: {name}={value!r} is not supported, expected {neutral!r}"


def test_a_nested_object_is_named_in_its_errors() -> None:
    nested = reader(inner={"a": 1, "b": 2}).nested("inner")
    assert nested.take("a") == 1
    assert refused(nested.take, "c") == f"{WHERE}: inner: expected key 'c', found none"
    assert refused(nested.finish).startswith(f"{WHERE}: inner: unknown keys b")
    assert refused(reader(inner=[1]).nested, "inner") == f"{WHERE}: inner: expected an object, got [1]"


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
        {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_scaling": None},
        {"rope_theta": 1e4, "partial_rotary_factor": 0.5, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}, "rope_theta": 10000},
    ],
)
def test_spellings_of_rope(spelling: dict) -> None:
    read = reader(**spelling)
    assert rope_spec(read.rope(), 12, 4096) == RopeSpec(1e4, 6)
    read.finish()


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ({"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 1e4}, "rope_theta=1000000.0 contradicts"),
        ({"rope_theta": 5.0, "rope_scaling": {"type": "su"}}, "rope parameters: rope_type='su' is not supported"),
        ({"rope_theta": 5.0, "rope_scaling": {"rope_type": "linear"}}, "rope parameters: expected key 'factor'"),
        ({"rope_theta": 5.0, "rope_scaling": {"factor": 2.0}}, "rope parameters: unknown keys factor"),
        ({"rope_scaling": None}, "rope parameters: expected key 'rope_theta', found none"),
    ],
)
def test_rope_that_contradicts_itself_or_is_not_implemented(spelling: dict, message: str) -> None:
    found = refused(lambda: rope_spec(reader(**spelling).rope(), 12, 4096))
    assert found.startswith(f"{WHERE}: ")
    assert message in found


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({"type": "linear", "factor": 3}, LinearScaling(3.0)),
        ({"rope_type": "dynamic", "factor": 2.0}, DynamicScaling(2.0, 4096)),
        (
            {
                "rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
                "original_max_position_embeddings": 512,
            },
            Llama3Scaling(8.0, 1.0, 4.0, 512),
        ),
        ({"type": "yarn", "factor": 4, "original_max_position_embeddings": 512}, YarnScaling(4.0, 512)),
        (
            {
                "type": "yarn", "original_max_position_embeddings": 512, "beta_fast": 16, "beta_slow": None,
                "truncate": False, "mscale": 1.0, "mscale_all_dim": 0.7,
            },
            YarnScaling(8.0, 512, 16.0, 1.0, False, None, 1.0, 0.7),
        ),
        ({"type": "yarn", "factor": 4.0, "attention_factor": 1.5}, YarnScaling(4.0, 4096, attention_factor=1.5)),
    ],
)  # fmt: skip
def test_rope_scalings(keys: dict, scaling: RopeScaling) -> None:
    assert rope_spec(reader(rope_theta=7, rope_scaling=keys).rope(), 12, 4096) == RopeSpec(7.0, 12, scaling=scaling)


def test_end_tokens() -> None:
    assert end_tokens(None) == ()
    assert end_tokens(0) == (0,)
    assert end_tokens([2, 5]) == (2, 5)

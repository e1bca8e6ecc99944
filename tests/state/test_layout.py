"""Bytes of state: the published sizes of whole models, and one group for each kind of mixer."""

import json
from pathlib import Path

import pytest

from jaxhybrid.config import DenseSpec, GatedDeltaNetSpec, KimiDeltaSpec, LatentAttentionSpec, LayerSpec
from jaxhybrid.models import translate
from jaxhybrid.state.layout import LeafSpec, StateDtypes, StateLayout, layout_of

CONFIGS = Path(__file__).parents[2] / "configs"
PUBLISHED_DTYPES = StateDtypes(state="float32", cache="bfloat16")


def published(name: str, dtypes: StateDtypes = PUBLISHED_DTYPES) -> StateLayout:
    values = json.loads((CONFIGS / f"{name}.json").read_text())
    return layout_of(translate(values, name).layers, dtypes)


def bytes_of(layout: StateLayout) -> dict[str, int]:
    return {f"{leaf.group}.{leaf.name}": leaf.bytes for leaf in layout.leaves}


def test_kimi_linear_48b() -> None:
    """20 KDA layers of 2 MiB; 41.9 MB and 1.5 MB a sequence, 8,064 bytes a token: a snapshot is worth 5,384 tokens."""
    layout = published("kimi-linear-48b-a3b")
    assert bytes_of(layout) == {
        "kimi_delta.recurrent": 20 * 32 * 128 * 128 * 4,
        **{f"kimi_delta.conv_{name}": 20 * 3 * 4096 * 2 for name in "qkv"},
        "latent_attention.latent": 7 * (512 + 64) * 2,
    }
    assert layout.bytes_per_token == 8064
    assert round(bytes_of(layout)["kimi_delta.recurrent"] / 1e6, 1) == 41.9
    assert round(layout.bytes_per_slot / layout.bytes_per_token) == 5384
    half = published("kimi-linear-48b-a3b", StateDtypes("bfloat16", "bfloat16"))
    assert round(half.bytes_per_slot / half.bytes_per_token) == 2783
    assert layout.recurrent


def test_qwen3_next_80b() -> None:
    """36 Gated DeltaNet layers; 77.3 MB a sequence, 24,576 bytes a token: a snapshot is worth 3,144 tokens."""
    layout = published("qwen3-next-80b-a3b")
    assert bytes_of(layout) == {
        "gated_delta_net.recurrent": 36 * 32 * 128 * 128 * 4,
        "gated_delta_net.conv": 36 * 3 * (2 * 16 + 32) * 128 * 2,
        "attention.k": 12 * 2 * 256 * 2,
        "attention.v": 12 * 2 * 256 * 2,
    }
    assert layout.bytes_per_token == 24576
    assert round(layout.bytes_per_slot / 1e6, 1) == 77.3
    assert layout.bytes_per_slot // layout.bytes_per_token == 3144


def test_qwen3_8b_keeps_nothing_of_fixed_size() -> None:
    layout = published("qwen3-8b")
    assert layout.bytes_per_token == 36 * 2 * 8 * 128 * 2
    assert layout.bytes_per_slot == 0
    assert not layout.recurrent


DELTA = LayerSpec(KimiDeltaSpec(2, 3, 4), DenseSpec(5))
OTHER_DELTA = LayerSpec(KimiDeltaSpec(3, 5, 4), DenseSpec(5))
WIDER = LayerSpec(KimiDeltaSpec(2, 3, 4), DenseSpec(9))
LATENT = LayerSpec(LatentAttentionSpec(2, None, 6, 3, 2, 4, False), DenseSpec(5))


def test_layers_of_equal_mixers_share_a_group_in_the_order_they_come() -> None:
    layout = layout_of([DELTA, LATENT, WIDER, OTHER_DELTA, LATENT, DELTA])
    first, latent, second = "kimi_delta", "latent_attention", "kimi_delta.1"
    assert layout.groups == (first, latent, first, second, latent, first)
    assert layout.ordinals == (0, 0, 1, 0, 1, 2)
    assert {leaf.group: leaf.layers for leaf in layout.leaves} == {first: 3, latent: 2, second: 1}


def test_shapes_dtypes_and_growth() -> None:
    delta = LayerSpec(GatedDeltaNetSpec(2, 6, 5, 7, 3), DenseSpec(5))
    layout = layout_of([delta, LATENT], StateDtypes("float32", "bfloat16"), vocab_size=11)
    assert layout.leaves == (
        LeafSpec("gated_delta_net", "recurrent", 1, (6, 5, 7), "float32", "fixed", ("heads", None, None)),
        LeafSpec("gated_delta_net", "conv", 1, (2, 2 * 2 * 5 + 6 * 7), "bfloat16", "fixed", (None, "heads")),
        LeafSpec("latent_attention", "latent", 1, (8,), "bfloat16", "paged", (None,)),
        LeafSpec("output", "logits", 1, (11,), "float32", "fixed", ("vocab",)),
    )
    assert layout.fixed == (*layout.leaves[:2], layout.leaves[3])
    assert layout.paged == layout.leaves[2:3]
    assert layout.bytes_per_slot == 6 * 5 * 7 * 4 + 2 * 62 * 2 + 11 * 4
    assert layout.bytes_per_token == 16


@pytest.mark.parametrize(("layers", "recurrent"), [([DELTA], True), ([LATENT], False), ([LATENT, DELTA], True)])
def test_logits_alone_make_no_model_recurrent(layers: list[LayerSpec], recurrent: bool) -> None:
    assert layout_of(layers, vocab_size=11).recurrent is recurrent

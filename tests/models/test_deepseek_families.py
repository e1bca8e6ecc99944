"""The DeepSeek line's translations: published sizes and schedules, state layouts, and refusals."""

import json
import math
from pathlib import Path

import jax
import pytest
from flax import nnx

from jaxhybrid import models
from jaxhybrid.config import (
    CompressedAttentionSpec,
    HyperConnections,
    IndexerSpec,
    LatentAttentionSpec,
    ModelConfig,
    MoeSpec,
    RopeSpec,
    YarnScaling,
)
from jaxhybrid.errors import ConfigError
from jaxhybrid.layers.context import Execution
from jaxhybrid.layers.decoder import abstract_decoder
from jaxhybrid.state.arrays import pool_arrays
from jaxhybrid.state.layout import StateDtypes, layout_of

CONFIGS = Path(__file__).parents[2] / "configs"


def published(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def translate(name: str, changes: dict | None = None) -> ModelConfig:
    values = published(name) | (changes or {})
    return models.translate(values, name)


def parameters(module: nnx.Module) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.split(module)[1]))


# Parameters of the trunk in billions as published; bytes a token and megabytes a sequence, in bfloat16.
SIZES = {
    "deepseek-v2": (236, 69_120, 0),
    "deepseek-v2-lite": (15.7, 31_104, 0),
    "deepseek-v3": (671, 70_272, 0),
    "kimi-k2": (1026, 70_272, 0),
    "deepseek-v3.2": (672, 85_888, 0),
    "glm-5": (744, 109_824, 0),
    "deepseek-v4-flash": (284, 6_880, 6.2),
}


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes(name: str) -> None:
    config = translate(name)
    decoder = abstract_decoder(config, Execution(True, True), "bfloat16")
    billions, token_bytes, sequence_megabytes = SIZES[name]
    assert (parameters(decoder) - parameters(decoder.mtp)) / 1e9 == pytest.approx(billions, rel=5e-3)
    layout = layout_of(config.layers, StateDtypes(cache="bfloat16"))
    assert layout.bytes_per_token == token_bytes
    assert layout.bytes_per_slot / 1e6 == pytest.approx(sequence_megabytes, abs=0.05)
    assert layout.recurrent == (sequence_megabytes > 0)


def test_deepseek_v2_as_published() -> None:
    config, lite = translate("deepseek-v2"), translate("deepseek-v2-lite")
    assert [layer.ffn.kind for layer in config.layers] == ["dense", *["moe"] * 59]
    mixer, moe, plain = config.layers[0].mixer, config.layers[1].ffn, lite.layers[1].ffn
    assert isinstance(mixer, LatentAttentionSpec)
    assert isinstance(moe, MoeSpec)
    assert isinstance(plain, MoeSpec)
    assert (moe.scoring, moe.n_group, moe.topk_group, moe.norm_topk_prob) == ("softmax", 8, 3, False)
    assert (plain.n_group, plain.shared_intermediate_size, plain.routed_scaling_factor) == (1, 2816, 1.0)
    assert mixer.rope == RopeSpec(1e4, 64, True, YarnScaling(40.0, 4096, mscale=0.707, mscale_all_dim=0.707))
    assert mixer.scale_factor == pytest.approx(1.2608**2, rel=1e-4)


def test_deepseek_v3_and_kimi_k2_as_published() -> None:
    config, k2 = translate("deepseek-v3"), translate("kimi-k2")
    mixer, moe = config.layers[0].mixer, config.layers[3].ffn
    assert isinstance(mixer, LatentAttentionSpec)
    assert isinstance(moe, MoeSpec)
    assert [layer.ffn.kind for layer in config.layers].index("moe") == 3
    assert mixer.scale_factor == pytest.approx(1.8739, rel=1e-4)
    assert (moe.n_group, moe.topk_group, moe.corrected) == (8, 4, True)
    assert (len(config.mtp_layers), len(k2.mtp_layers)) == (1, 0)
    assert config.mtp_layers[0] == config.layers[-1]
    assert (k2.model_type, len(k2.layers)) == ("deepseek_v3", 61)


def test_indexers_turn_halves_in_deepseek_and_neighbours_in_glm() -> None:
    v32, glm = translate("deepseek-v3.2").layers[5].mixer, translate("glm-5").layers[5].mixer
    for mixer, interleaved, heads in ((v32, False, 64), (glm, True, 32)):
        assert isinstance(mixer, LatentAttentionSpec)
        assert isinstance(mixer.indexer, IndexerSpec)
        assert mixer.rope is not None
        assert mixer.rope.interleaved
        assert mixer.indexer.rope.interleaved is interleaved
        assert (mixer.indexer.num_heads, mixer.indexer.head_dim, mixer.indexer.top_k) == (heads, 128, 2048)


def test_glm_layers_share_indexers_as_listed_patterned_or_counted() -> None:
    counted = translate("glm-5", {"index_topk_freq": 4, "index_skip_topk_offset": 3})
    full = [number for number, layer in enumerate(counted.layers) if layer.mixer.indexer != "shared"]
    assert full == [0, 1, 2, *range(6, 78, 4)]
    # 21 layers keep keys of their indexer.
    assert layout_of(counted.layers, StateDtypes(cache="bfloat16")).bytes_per_token == 95_232
    kinds = ["full" if number in full else "shared" for number in range(78)]
    assert translate("glm-5", {"indexer_types": kinds}) == counted
    pattern = "".join(kind[0].upper() for kind in kinds)
    assert translate("glm-5", {"index_topk_pattern": pattern, "index_share_for_mtp_iteration": True}) == counted


def test_deepseek_v4_as_published() -> None:
    config = translate("deepseek-v4-flash")
    mixers = [layer.mixer for layer in config.layers]
    assert all(isinstance(mixer, CompressedAttentionSpec) for mixer in mixers)
    assert [mixer.stride for mixer in mixers] == [None, None, *[4, 128] * 20, 4]
    assert {mixer.stride: (mixer.overlap, mixer.indexer is not None) for mixer in mixers} == {
        None: (False, False),
        4: (True, True),
        128: (False, False),
    }
    assert mixers[0].rope == RopeSpec(1e4, 64, True)
    assert mixers[2].rope == RopeSpec(1.6e5, 64, True, YarnScaling(16.0, 65536, attention_factor=1.0))
    assert [layer.ffn.hashed for layer in config.layers] == [True] * 3 + [False] * 40
    assert config.residual == HyperConnections(4, 20, 1e-6)
    assert config.mtp_layers[0].mixer == mixers[0]
    assert config.mtp_layers[0].ffn == config.layers[-1].ffn
    assert config.layers[0].ffn.activation.limit == 10.0


def test_a_page_holds_whole_entries() -> None:
    layout = layout_of(translate("deepseek-v4-flash").layers[:4])
    pool = jax.eval_shape(lambda: pool_arrays(layout, 3, 5, 128))
    shapes = {(group, name): array.shape for group, leaves in pool.items() for name, array in leaves.items()}
    assert shapes["compressed_attention.1", "entries"] == (1, 5, 32, 512)
    assert shapes["compressed_attention.1", "index_pooling"] == (1, 3, 3, 3, 128)
    assert shapes["compressed_attention.2", "entries"] == (1, 5, 1, 512)
    assert shapes["compressed_attention.2", "pooling"] == (1, 3, 1, 3, 512)
    with pytest.raises(ConfigError, match="page_size=64 must be a multiple of 128: so many tokens share one of the"):
        pool_arrays(layout, 3, 5, 64)


@pytest.mark.parametrize(
    ("name", "changes", "named"),
    [
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc'"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob=True"),
        ("deepseek-v2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
        ("deepseek-v3", {"num_key_value_heads": 8}, "num_key_value_heads=8"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method='greedy'"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ("deepseek-v3", {"mlp_layer_types": ["sparse"] * 61}, "contradicts first_k_dense_replace=3"),
        ("deepseek-v3.2", {"indexer_rope_interleave": True}, "indexer_rope_interleave=True"),
        ("deepseek-v3.2", {"q_lora_rank": None}, "q_lora_rank=None"),
        ("glm-5", {"indexer_types": ["shared"] * 78}, "full first"),
        ("glm-5", {"indexer_types": ["full"] * 77}, "each of 78 layers"),
        ("glm-5", {"qk_head_dim": 255}, "qk_head_dim=255"),
        ("deepseek-v4-flash", {"compress_ratios": [0] * 42}, "expected one for each of 43 layers"),
        ("deepseek-v4-flash", {"compress_ratios": [0] * 43 + [4]}, "then 0"),
        ("deepseek-v4-flash", {"layer_types": ["full_attention"] * 43, "compress_rates": {}}, "got full_attention"),
        ("deepseek-v4-flash", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid'"),
    ],
)
def test_unsupported_and_contradictory_options_are_named(name: str, changes: dict, named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        translate(name, changes)
    assert str(caught.value).startswith(f"{name}: ")
    assert named in str(caught.value)


def test_layer_types_and_rates_say_the_same_as_ratios() -> None:
    values = published("deepseek-v4-flash")
    names = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    spelt = {
        "layer_types": [names[ratio] for ratio in values["compress_ratios"][:-1]],
        "compress_rates": {names[ratio]: ratio for ratio in (4, 128)},
    }
    # The ratios are then nobody's.
    with pytest.raises(ConfigError, match="unknown keys compress_ratios"):
        translate("deepseek-v4-flash", spelt)
    without = {key: value for key, value in (values | spelt).items() if key != "compress_ratios"}
    assert models.translate(without, "x") == translate("deepseek-v4-flash")

"""What kind of value each key of a published config.json or preprocessor_config.json has.

A key's name says it, whatever the family and the object it stands in. Keys that are compared with what is implemented
(`ConfigReader.require`), or dropped, need none. How values go together is checked where specs are made.
"""

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """`expected` says in words of which values `holds` is true."""

    expected: str
    holds: Callable[[Any], bool]


def _integer(least: int, most: int) -> Kind:
    def holds(value: Any) -> bool:
        return type(value) is int and least <= value <= most  # true and false are ints, too

    return Kind(f"an integer from {least} to {most}", holds)


def _number(words: str, within: Callable[[float], bool]) -> Kind:
    def holds(value: Any) -> bool:
        # A whole number may be too great for a float; NaN compares false.
        return type(value) in (int, float) and abs(value) <= sys.float_info.max and within(value)

    return Kind(words, holds)


def _list(words: str, each: Kind, count: int | None = None) -> Kind:
    def holds(value: Any) -> bool:
        return isinstance(value, list) and count in (None, len(value)) and all(map(each.holds, value))

    return Kind(words, holds)


def _either(one: Kind, other: Kind) -> Kind:
    return Kind(f"{one.expected}, or {other.expected}", lambda value: one.holds(value) or other.holds(value))


MOST = 2**31 - 1  # devices count in int32
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
TEXT = Kind("a string", lambda value: isinstance(value, str))
OBJECT = Kind("an object", lambda value: isinstance(value, Mapping))
AUTO = Kind("'auto'", lambda value: value == "auto")
SIZE, COUNT, LAYERS, LAYERS_OR_NONE = _integer(1, MOST), _integer(0, MOST), _integer(1, 1000), _integer(0, 1000)
GREY = _integer(0, 255)
NUMBER = _number("a number", lambda value: True)
POSITIVE = _number("a number above 0", lambda value: value > 0)
NEGATIVE = _number("a number below 0", lambda value: value < 0)
NOT_NEGATIVE = _number("a number from 0 up", lambda value: value >= 0)
STRETCH = _number("a number from 1 up", lambda value: value >= 1)
BASE = _number("a number above 1", lambda value: value > 1)
SHARE = _number("a number above 0 and at most 1", lambda value: 0 < value <= 1)
COUNTS = _list("a list of integers from 0 up", COUNT)
TEXTS = _list("a list of strings", TEXT)


def _are_step_limits(value: Any) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    low, high = value  # JSON has no infinity; files write it in several ways
    return NOT_NEGATIVE.holds(low) and (high in (math.inf, *INFINITIES) or NOT_NEGATIVE.holds(high))


INFINITIES = ({"__float__": "Infinity"}, "Infinity")
STEP_LIMITS = Kind("a list of two numbers from 0 up, of which the second may be infinite", _are_step_limits)


_NAMES: Mapping[Kind, tuple[str, ...]] = {
    FLAG: (
        *("tie_word_embeddings", "norm_topk_prob", "moe_renormalize", "attention_bias", "use_bias", "use_conv_bias"),
        *("mamba_conv_bias", "mamba_proj_bias", "mamba_rms_norm", "mamba_norm_before_gate", "mla_use_output_gate"),
        *("use_full_rank_gate", "latent_moe_use_norm", "truncate", "chessboard_square_on_top_left"),
    ),
    TEXT: (
        *("model_type", "topk_method", "rope_type", "position_embedding_type", "hybrid_override_pattern"),
        *("mtp_hybrid_override_pattern", "pattern"),
    ),
    TEXTS: ("layer_types", "layers_block_type", "mtp_layers_block_type", "mlp_layer_types", "indexer_types"),
    _either(TEXT, TEXTS): ("index_topk_pattern",),
    OBJECT: (
        *("rope_parameters", "rope_scaling", "sliding_attention", "full_attention", "main", "compress", "size"),
        *("transparent_bg_config",),
    ),
    LAYERS: ("num_hidden_layers", "depth", "vt_num_hidden_layers", "hc_sinkhorn_iters", "hc_mult"),
    LAYERS_OR_NONE: (
        *("first_k_dense_replace", "num_hash_layers", "num_nextn_predict_layers", "mtp_num_hidden_layers"),
    ),
    SIZE: (
        *("vocab_size", "hidden_size", "max_position_embeddings", "model_max_length", "sliding_window", "head_dim"),
        *("original_max_position_embeddings", "num_attention_heads", "num_key_value_heads", "attention_head_dim"),
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "o_groups"),
        *("o_lora_rank", "index_n_heads", "index_head_dim", "index_topk", "index_topk_freq", "num_heads"),
        *("short_conv_kernel_size", "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
        *("linear_num_key_heads", "linear_num_value_heads", "attn_res_block_size", "full_attention_interval"),
        *("sliding_window_pattern", "_sliding_window_pattern", "conv_kernel", "ssm_state_size", "mamba_d_state"),
        *("mamba_d_conv", "mamba_d_ssm", "mamba_expand", "mamba_n_heads", "mamba_n_groups", "mamba_num_heads"),
        *("mamba_head_dim", "n_groups", "intermediate_size", "moe_intermediate_size", "n_group", "topk_group"),
        *("num_expert_group", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
        *("moe_latent_size", "routed_expert_hidden_size", "n_routed_experts", "decoder_sparse_step"),
        *("compressed_sparse_attention", "heavily_compressed_attention"),
        *("attn_layer_period", "expert_layer_period", "patch_size", "temporal_patch_size", "spatial_merge_size"),
        *("out_hidden_size", "num_position_embeddings", "init_pos_emb_height", "vt_hidden_size"),
        *("vt_intermediate_size", "vt_num_attention_heads", "qkv_hidden_size", "shortest_edge", "longest_edge"),
        *("min_pixels", "max_pixels", "in_patch_limit", "patch_limit_on_one_side", "chessboard_square_size"),
    ),
    COUNT: (
        *("bos_token_id", "image_token_id", "video_token_id", "media_placeholder_token_id", "num_experts"),
        *("num_local_experts", "num_experts_per_tok", "num_experts_per_token", "experts_per_token"),
        *("n_shared_experts", "num_shared_experts", "shared_intermediate_size", "index_skip_topk_offset"),
        *("attn_layer_offset", "expert_layer_offset"),
    ),
    GREY: ("chessboard_white_value", "chessboard_gray_value"),
    _either(SIZE, AUTO): ("mamba_d_head", "mamba_dt_rank"),
    _either(COUNT, COUNTS): ("eos_token_id",),
    COUNTS: ("mlp_only_layers", "attn_layer_indices", "kda_layers", "full_attn_layers", "compress_ratios"),
    _list("a list of two integers from 1 up", SIZE, 2): ("merge_kernel_size",),
    _list("a list of three integers from 0 up", COUNT, 3): ("mrope_section",),
    SHARE: (
        *("rms_norm_eps", "layer_norm_epsilon", "norm_eps", "projector_ln_eps", "hc_eps", "partial_rotary_factor"),
    ),
    BASE: ("rope_theta", "compress_rope_theta", "rope_local_base_freq"),
    STRETCH: ("factor",),
    POSITIVE: (
        *("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "swiglu_limit"),
        *("routed_scaling_factor", "activation_situ_beta", "activation_situ_linear_beta", "query_pre_attn_scalar"),
        *("logits_scaling", "embedding_multiplier", "attention_multiplier", "residual_multiplier", "key_multiplier"),
        *("attention_in_multiplier", "attention_out_multiplier", "lm_head_multiplier", "ssm_in_multiplier"),
        *("ssm_out_multiplier",),
    ),
    NOT_NEGATIVE: ("mscale", "mscale_all_dim"),
    NEGATIVE: ("gate_lower_bound",),
    _list("a list of two numbers above 0", POSITIVE, 2): ("mlp_multipliers",),
    _list("a list of five numbers above 0 (for z, x, B, C and dt)", POSITIVE, 5): ("ssm_multipliers",),
    STEP_LIMITS: ("time_step_limit",),
    _list("a list of three numbers", NUMBER, 3): ("image_mean",),
    _list("a list of three numbers above 0", POSITIVE, 3): ("image_std",),
}

KINDS: Mapping[str, Kind] = {name: kind for kind, names in _NAMES.items() for name in names}

"""Tiny DeepSeek-V3.2 models, in the key style of the released checkpoint.

Dimensions are distinct wherever the architecture allows, so that a transposed or swapped axis cannot pass unnoticed.
Of few index heads many scores are exactly 0, and a choice among equals is anyone's: hence their number.
"""

from deepseek_reference import DEEPSEEK_REFERENCE
from golden import Config, Golden

from golden_configs.deepseek_v3 import V3, V3_A

_RELEASE: Config = {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}

_V32_A: Config = V3_A | _RELEASE | {"index_head_dim": 18, "index_n_heads": 32, "index_topk": 24, "num_hidden_layers": 3}

# One group, another length of choice, and a prediction layer with an indexer of its own.
_V32_B: Config = (
    V3
    | _RELEASE
    | {
        "hidden_size": 36,
        "index_head_dim": 13,
        "index_n_heads": 31,
        "index_topk": 50,
        "intermediate_size": 70,
        "kv_lora_rank": 15,
        "moe_intermediate_size": 12,
        "n_group": 1,
        "n_routed_experts": 5,
        "n_shared_experts": 2,
        "num_attention_heads": 2,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 22,
        "qk_nope_head_dim": 14,
        "qk_rope_head_dim": 10,
        "rope_scaling": None,
        "topk_group": 1,
        "v_head_dim": 17,
        "vocab_size": 79,
    }
)

GOLDENS = {
    "deepseek_v32_a": Golden(_V32_A, second_reference=DEEPSEEK_REFERENCE),
    "deepseek_v32_b": Golden(_V32_B, reference=DEEPSEEK_REFERENCE),
}

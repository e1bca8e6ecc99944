"""The demo architecture as one differentiable function of its parameters, for training on whole windows.

The runtime's layers thread state, pages and slots through every call and read only the chosen experts; training
wants neither. A test holds the logits of this form to those of `jaxhybrid.forward`.

Parameters are a flat dict under the published tensor names, save that the experts of a layer are one array
(`...experts.w1`, [experts, out, in]) and the delta layers' `A_log` and convolutions have no axes of length 1.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxhybrid.demo.architecture import CONFIG
from pallas_kernels.gated_delta import gated_delta

Parameters = dict[str, Array]

HIDDEN, HEADS, EXPERTS = CONFIG["hidden_size"], CONFIG["num_attention_heads"], CONFIG["num_experts"]
NOPE, ROPE, VALUE = CONFIG["qk_nope_head_dim"], CONFIG["qk_rope_head_dim"], CONFIG["v_head_dim"]
RANK, DELTA_DIM = CONFIG["kv_lora_rank"], CONFIG["linear_attn_config"]["head_dim"]
LAYERS = CONFIG["num_hidden_layers"]


def initial_parameters(key: Array) -> Parameters:
    """Normal matrices of standard deviation 1 / sqrt(inputs); decays between 1 and 99.9 % a token."""
    shapes = parameter_shapes()
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    return {name: _initial(name, shape, keys[name]) for name, shape in shapes.items()}


def _initial(name: str, shape: tuple[int, ...], key: Array) -> Array:
    if name.endswith("norm.weight"):
        return jnp.ones(shape)
    if name.endswith("e_score_correction_bias"):
        return jnp.zeros(shape)
    if name.endswith("A_log"):
        return jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=4.0))
    if name.endswith("dt_bias"):
        step = jnp.exp(jax.random.uniform(key, shape, minval=jnp.log(0.001), maxval=jnp.log(0.1)))
        return step + jnp.log(-jnp.expm1(-step))
    scale = 0.04 if name == "model.embed_tokens.weight" else shape[-1] ** -0.5
    return scale * jax.random.normal(key, shape)


def parameter_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (CONFIG["vocab_size"], HIDDEN)}
    for layer in range(LAYERS + CONFIG["num_nextn_predict_layers"]):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (HIDDEN,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (HIDDEN,)
        mixer = _delta_shapes() if is_delta(layer) else _latent_shapes()
        ffn = _dense_shapes("mlp", CONFIG["intermediate_size"]) if is_dense(layer) else _moe_shapes()
        shapes |= {f"{prefix}.self_attn.{name}": shape for name, shape in mixer.items()}
        shapes |= {f"{prefix}.{name}": shape for name, shape in ffn.items()}
    shapes |= {f"{prefix}.{name}.weight": (HIDDEN,) for name in ("enorm", "hnorm", "shared_head.norm")}
    shapes[f"{prefix}.eh_proj.weight"] = (HIDDEN, 2 * HIDDEN)
    shapes["model.norm.weight"] = (HIDDEN,)
    return shapes


def is_delta(layer: int) -> bool:
    return layer + 1 in CONFIG["linear_attn_config"]["kda_layers"]


def is_dense(layer: int) -> bool:
    return layer < CONFIG["first_k_dense_replace"]


def _delta_shapes() -> dict[str, tuple[int, ...]]:
    width = HEADS * DELTA_DIM
    shapes: dict[str, tuple[int, ...]] = {f"{part}_proj.weight": (width, HIDDEN) for part in "qkv"}
    shapes |= {f"{part}_conv1d.weight": (width, 4) for part in "qkv"}
    shapes |= {f"{part}_a_proj.weight": (DELTA_DIM, HIDDEN) for part in "fg"}
    shapes |= {f"{part}_b_proj.weight": (width, DELTA_DIM) for part in "fg"}
    shapes |= {"b_proj.weight": (HEADS, HIDDEN), "A_log": (HEADS,), "dt_bias": (width,)}
    return shapes | {"o_norm.weight": (DELTA_DIM,), "o_proj.weight": (HIDDEN, width)}


def _latent_shapes() -> dict[str, tuple[int, ...]]:
    return {
        "q_proj.weight": (HEADS * (NOPE + ROPE), HIDDEN),
        "kv_a_proj_with_mqa.weight": (RANK + ROPE, HIDDEN),
        "kv_a_layernorm.weight": (RANK,),
        "kv_b_proj.weight": (HEADS * (NOPE + VALUE), RANK),
        "g_proj.weight": (HEADS * VALUE, HIDDEN),
        "o_proj.weight": (HIDDEN, HEADS * VALUE),
    }


def _dense_shapes(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (width, HIDDEN),
        f"{prefix}.up_proj.weight": (width, HIDDEN),
        f"{prefix}.down_proj.weight": (HIDDEN, width),
    }


def _moe_shapes() -> dict[str, tuple[int, ...]]:
    width, prefix = CONFIG["moe_intermediate_size"], "block_sparse_moe"
    return {
        f"{prefix}.gate.weight": (EXPERTS, HIDDEN),
        f"{prefix}.gate.e_score_correction_bias": (EXPERTS,),
        f"{prefix}.experts.w1": (EXPERTS, width, HIDDEN),
        f"{prefix}.experts.w2": (EXPERTS, HIDDEN, width),
        f"{prefix}.experts.w3": (EXPERTS, width, HIDDEN),
    } | _dense_shapes(f"{prefix}.shared_experts", width * CONFIG["num_shared_experts"])


def forward(
    p: Parameters, tokens: Int[Array, "B T"], mtp_rows: int
) -> tuple[Float[Array, "B T V"], Float[Array, "rows T-1 V"], dict[str, Float[Array, " E"]]]:
    """Logits of the next token; of the one after it, for the first `mtp_rows` rows; each expert's share of tokens."""
    loads: dict[str, Array] = {}
    embedding = p["model.embed_tokens.weight"]
    embedded = embedding[tokens]
    h = embedded
    for layer in range(LAYERS):
        h = _layer(p, layer, h, loads)
    h = norm(h, p["model.norm.weight"])
    prefix = f"model.layers.{LAYERS}"
    ahead = norm(embedded[:mtp_rows, 1:], p[f"{prefix}.enorm.weight"])
    joined = jnp.concatenate([ahead, norm(h[:mtp_rows, :-1], p[f"{prefix}.hnorm.weight"])], axis=-1)
    further = _layer(p, LAYERS, joined @ p[f"{prefix}.eh_proj.weight"].T, loads)
    further = norm(further, p[f"{prefix}.shared_head.norm.weight"])
    return h @ embedding.T, further @ embedding.T, loads


def _layer(p: Parameters, layer: int, h: Float[Array, "B T D"], loads: dict[str, Array]) -> Float[Array, "B T D"]:
    own = _below(p, f"model.layers.{layer}.")
    mixer = _delta if is_delta(layer) else _latent
    h = h + mixer(_below(own, "self_attn."), norm(h, own["input_layernorm.weight"]))
    x = norm(h, own["post_attention_layernorm.weight"])
    if is_dense(layer):
        return h + _dense(_below(own, "mlp."), x)
    moe = _below(own, "block_sparse_moe.")
    weights, loads[f"model.layers.{layer}.block_sparse_moe.gate.e_score_correction_bias"] = _route(moe, x)
    return h + _experts(moe, x, weights) + _dense(_below(moe, "shared_experts."), x)


def _below(p: Parameters, prefix: str) -> Parameters:
    return {name.removeprefix(prefix): value for name, value in p.items() if name.startswith(prefix)}


def norm(x: Array, weight: Array, eps: float = CONFIG["rms_norm_eps"]) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def _dense(p: Parameters, x: Array) -> Array:
    return (jax.nn.silu(x @ p["gate_proj.weight"].T) * (x @ p["up_proj.weight"].T)) @ p["down_proj.weight"].T


def _route(p: Parameters, x: Array) -> tuple[Float[Array, "B T E"], Float[Array, " E"]]:
    """A weight for every expert, zero where it is not chosen (DeepSeek-V3, arXiv 2412.19437, equations 12 to 16)."""
    gates = jax.nn.sigmoid(x @ p["gate.weight"].T)
    biased = jax.lax.stop_gradient(gates + p["gate.e_score_correction_bias"])
    last_chosen = jax.lax.top_k(biased, CONFIG["num_experts_per_token"])[0][..., -1:]
    chosen = biased >= last_chosen
    kept = jnp.where(chosen, gates, 0.0)
    weights = kept / (kept.sum(-1, keepdims=True) + 1e-20) * CONFIG["routed_scaling_factor"]
    return weights, chosen.mean((0, 1), dtype=jnp.float32)


def _experts(p: Parameters, x: Array, weights: Float[Array, "B T E"]) -> Array:
    """Every expert on every token: with narrow experts one wide product costs a CPU less than sorting tokens."""
    gate, up = (x @ p[f"experts.{part}"].reshape(-1, HIDDEN).T for part in ("w1", "w3"))
    inner = (jax.nn.silu(gate) * up).reshape(*x.shape[:-1], EXPERTS, -1) * weights[..., None]
    down = jnp.moveaxis(p["experts.w2"], 2, 1).reshape(-1, HIDDEN)
    return inner.reshape(*x.shape[:-1], -1) @ down


def _latent(p: Parameters, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """MLA without positions, keys and values written out."""
    batch, steps, _ = x.shape
    q = (x @ p["q_proj.weight"].T).reshape(batch, steps, HEADS, NOPE + ROPE)
    compressed = x @ p["kv_a_proj_with_mqa.weight"].T
    latent = norm(compressed[..., :RANK], p["kv_a_layernorm.weight"], 1e-6)
    kv = (latent @ p["kv_b_proj.weight"].T).reshape(batch, steps, HEADS, NOPE + VALUE)
    shared = jnp.broadcast_to(compressed[:, :, None, RANK:], (batch, steps, HEADS, ROPE))
    k = jnp.concatenate([kv[..., :NOPE], shared], axis=-1)
    scores = jnp.einsum("bthd,bshd->bhts", q * (NOPE + ROPE) ** -0.5, k)
    scores = jnp.where(jnp.tril(jnp.ones((steps, steps), bool)), scores, -jnp.inf)
    out = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores, axis=-1), kv[..., NOPE:])
    gate = jax.nn.sigmoid(x @ p["g_proj.weight"].T)
    return (out.reshape(batch, steps, -1) * gate) @ p["o_proj.weight"].T


def _delta(p: Parameters, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Kimi Delta Attention (arXiv 2510.26692, section 3)."""
    batch, steps, _ = x.shape
    split = (batch, steps, HEADS, DELTA_DIM)
    q, k, v = (_conv(x @ p[f"{part}_proj.weight"].T, p[f"{part}_conv1d.weight"]).reshape(split) for part in "qkv")
    raw = x @ p["f_a_proj.weight"].T @ p["f_b_proj.weight"].T + p["dt_bias"]
    log_decay = -jnp.exp(p["A_log"])[:, None] * jax.nn.softplus(raw).reshape(split)
    beta = jax.nn.sigmoid(x @ p["b_proj.weight"].T)
    out = norm(delta_rule(q, k, v, log_decay, beta), p["o_norm.weight"])
    gate = jax.nn.sigmoid(x @ p["g_a_proj.weight"].T @ p["g_b_proj.weight"].T).reshape(split)
    return (out * gate).reshape(batch, steps, -1) @ p["o_proj.weight"].T


def _conv(x: Float[Array, "B T C"], weight: Float[Array, "C K"]) -> Float[Array, "B T C"]:
    taps, steps = weight.shape[1], x.shape[1]
    padded = jnp.pad(x, ((0, 0), (taps - 1, 0), (0, 0)))
    return jax.nn.silu(sum(padded[:, j : j + steps] * weight[:, j] for j in range(taps)))


def delta_rule(
    q: Float[Array, "B T H d"],
    k: Float[Array, "B T H d"],
    v: Float[Array, "B T H d"],
    log_decay: Float[Array, "B T H d"],
    beta: Float[Array, "B T H"],
) -> Float[Array, "B T H d"]:
    """The runtime's kernel from an empty state."""
    batch, steps, heads, dim = q.shape
    slots = jnp.arange(batch)
    state = jnp.zeros((1, batch, heads, dim, dim))
    return gated_delta(q, k, v, log_decay, beta, state, 0, slots, slots, jnp.full(batch, steps))[0]

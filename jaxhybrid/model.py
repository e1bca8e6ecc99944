"""Loading a model and scoring tokens with it, without cache or engine."""

import math
import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxhybrid.checkpoint.dequantise import DequantisedFolder
from jaxhybrid.checkpoint.fill import fill
from jaxhybrid.checkpoint.fingerprint import config_fingerprint, weights_fingerprint
from jaxhybrid.checkpoint.orbax_folder import OrbaxFolder, is_orbax_folder, save_orbax
from jaxhybrid.checkpoint.safetensors_folder import CheckpointFolder, read_config
from jaxhybrid.config import ModelConfig
from jaxhybrid.errors import ConfigError, TokenError
from jaxhybrid.generation import GENERATION_CONFIG, GenerationDefaults, read_generation_defaults
from jaxhybrid.image_patches import PREPROCESSOR_CONFIG, PatchRule
from jaxhybrid.kimi_patches import KimiRule
from jaxhybrid.layers.context import Execution
from jaxhybrid.layers.decoder import Decoder, abstract_decoder
from jaxhybrid.layers.step import MediaInputs
from jaxhybrid.layers.vision import frame_inputs
from jaxhybrid.media import Frame, Media, place, rope_positions
from jaxhybrid.models import family_of, translate
from jaxhybrid.models.rope_keys import with_rope_scaling
from jaxhybrid.models.weight_table import WeightTable
from jaxhybrid.parallel.fitting import execution_on, fit_to_mesh
from jaxhybrid.parallel.mesh import partition_of
from jaxhybrid.parallel.sharding import parameter_struct, pool_places
from jaxhybrid.platform import compiler_options
from jaxhybrid.qwen_patches import QwenRule
from jaxhybrid.state.arrays import PoolArrays, pool_arrays
from jaxhybrid.state.batch import BatchAddress
from jaxhybrid.state.layout import StateDtypes, StateLayout, layout_of
from pallas_kernels.partition import Partition

if TYPE_CHECKING:
    from jaxhybrid.chat import ChatTokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    GENERATION_CONFIG,
    PREPROCESSOR_CONFIG,
)
FORWARD_CHUNK = 512  # tokens per program call of `forward`: bounds its activations, not its length
FORWARD_PAGE = 128  # a multiple of the tokens that share an entry in any published model
PATCH_RULES: Mapping[str, type[PatchRule]] = {"qwen": QwenRule, "kimi": KimiRule}


class Model:
    """A loaded model: configuration, parameters, and where they came from. Immutable once made."""

    def __init__(
        self,
        config: ModelConfig,
        graph: nnx.GraphDef,
        parameters: nnx.State,
        dtypes: StateDtypes,
        path: Path,
        partition: Partition | None = None,
        rope_scaling: Mapping[str, Any] | None = None,
    ) -> None:
        """`partition`: the mesh that the parameters lie on, if there is one. `rope_scaling`: as in `load_model`."""
        self.config = config
        self.graph = graph
        self.parameters = parameters
        self.dtypes = dtypes
        self.path = path
        self.partition = partition
        self.rope_scaling = rope_scaling
        self.layout: StateLayout = layout_of(config.layers, dtypes, config.vocab_size)
        self.pool_places = pool_places(self.layout, partition, jax.default_backend())

    @cached_property
    def tokenizer(self) -> "ChatTokenizer":
        """Tokenizer and chat template of the checkpoint's folder. Raises TokenError where it has none."""
        from jaxhybrid.chat import ChatTokenizer  # scoring tokens needs no tokenizer

        return ChatTokenizer.from_folder(self.path)

    @cached_property
    def generation_defaults(self) -> GenerationDefaults:
        """End tokens and sampling that the checkpoint recommends; see `Sampling.from_defaults`."""
        return read_generation_defaults(self.path, self.config.eos_token_ids)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over all tensors of the checkpoint."""
        if is_orbax_folder(self.path):
            return OrbaxFolder.open(self.path).fingerprint
        return weights_fingerprint(CheckpointFolder.open(self.path))

    @cached_property
    def published_config(self) -> dict[str, Any]:
        """The checkpoint's config.json, with the `rope_scaling` that the model was loaded with."""
        return _published_config(self.path, self.rope_scaling)

    @cached_property
    def config_fingerprint(self) -> str:
        """SHA-256 of `published_config`."""
        return config_fingerprint(self.published_config)

    def save(self, path: str | Path) -> None:
        """Writes an Orbax folder that `load_model` reads, with the tokenizer's files beside the parameters.

        The parameters are kept as they are laid out here (see `Execution`). Raises CheckpointError if the folder holds
        a checkpoint already or cannot be written.
        """
        leaves = {leaf: variable[...] for leaf, variable in nnx.to_flat_state(self.parameters)}
        save_orbax(path, leaves, self.published_config, self.fingerprint)
        for name in TOKENIZER_FILES:
            if (self.path / name).is_file():
                shutil.copy(self.path / name, Path(path) / name)

    @cached_property
    def parameter_count(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.parameters))

    @cached_property
    def patch_rule(self) -> PatchRule:
        """How this model's images and videos are made of pixels: `jaxhybrid.image_patches`. Raises ConfigError."""
        if self.config.vision is None:
            raise ConfigError(f"{self.path}: the model takes text alone, it has no vision tower")
        return PATCH_RULES[self.config.vision.preparation].from_folder(self.path, self.config.vision)

    def embed_frame(self, frame: Frame) -> Float[Array, "n D"]:
        """The vision tower's embeddings of a still, one for each of its placeholders."""
        assert self.config.vision is not None
        inputs = frame_inputs(frame.patches, frame.height, frame.width, self.config.vision)
        tokens = len(frame.patches) // self.config.vision.patches_per_token
        return self._tower(self.parameters, inputs)[:tokens]

    @cached_property
    def _tower(self):
        return jax.jit(lambda parameters, frame: nnx.merge(self.graph, parameters).visual(frame))

    @cached_property
    def _chunk_logits(self):
        places = (None, self.pool_places)
        options = compiler_options(jax.default_backend())
        return jax.jit(
            partial(_chunk_logits, self.graph), donate_argnums=1, out_shardings=places, compiler_options=options
        )


def load_model(
    path: str | Path,
    dtype: DTypeLike = "float32",
    state_dtype: str = "float32",
    mesh: jax.sharding.Mesh | None = None,
    execution: Execution | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
) -> Model:
    """Reads a Hugging Face folder (config.json and safetensors in the published names), or one that `Model.save` wrote.

    `dtype`: of weights, activations and token-indexed state. `state_dtype`: of recurrent state. `mesh`: as
    `make_mesh` makes it; weights are split over it as they are read. `execution`: how parameters are
    laid out, by default as the platform wants them. `rope_scaling`: in place of the config's, to stretch positions
    beyond those the model was trained on, for instance {"rope_type": "linear", "factor": 4.0} for position
    interpolation (see `models/rope_keys.py`). Raises ConfigError for an unknown `model_type`, key or option, or
    where a head count or width doesn't divide by the mesh; CheckpointError naming every missing, unknown or misshapen
    tensor.
    """
    folder = Path(path)
    values = _published_config(folder, rope_scaling)
    where = str(folder / "config.json")
    config, partition = fit_to_mesh(translate(values, where), partition_of(mesh))
    execution = execution_on(partition, execution)
    graph, abstract = nnx.split(abstract_decoder(config, execution, dtype, partition))
    flat = nnx.to_flat_state(abstract)
    wanted = {leaf: parameter_struct(variable, partition, jax.default_backend()) for leaf, variable in flat}
    if is_orbax_folder(folder):
        leaves = OrbaxFolder.open(folder).load(wanted)
    else:
        table = WeightTable(config, execution)
        family_of(values, where).weights(table, config)
        leaves = fill(wanted, table.rules, DequantisedFolder.over(CheckpointFolder.open(folder)), table.ignored)
    parameters = nnx.from_flat_state([(leaf, variable.replace(leaves[leaf])) for leaf, variable in flat])
    return Model(
        config, graph, parameters, StateDtypes(state_dtype, jnp.dtype(dtype).name), folder, partition, rope_scaling
    )


def _published_config(folder: Path, rope_scaling: Mapping[str, Any] | None) -> dict[str, Any]:
    config = read_config(folder)
    return config if rope_scaling is None else with_rope_scaling(config, rope_scaling)


def check_tokens(token_ids: Sequence[int] | Int[np.ndarray, " T"], config: ModelConfig) -> Int[np.ndarray, " T"]:
    """The ids as int32 [T]. Raises TokenError for anything else: none, text, a prompt, an id out of range."""
    if isinstance(token_ids, str):
        raise TokenError("expected token ids, got text: model.tokenizer.encode(text) gives its ids")
    if hasattr(token_ids, "token_ids"):
        raise TokenError(f"expected token ids, got a {type(token_ids).__name__}: pass its .token_ids")
    try:
        ids = np.asarray(token_ids)
    except (TypeError, ValueError, OverflowError) as error:
        raise TokenError(f"expected a list of integer token ids, got {type(token_ids).__name__}: {error}") from error
    if ids.ndim != 1 or ids.size == 0:
        raise TokenError(f"expected a non-empty list of token ids, got shape {ids.shape}")
    if not np.issubdtype(ids.dtype, np.integer):
        raise TokenError(f"expected integer token ids, got {ids.dtype}")
    wrong = np.flatnonzero((ids < 0) | (ids >= config.vocab_size))
    if wrong.size:
        at = int(wrong[0])
        raise TokenError(f"token id {ids[at]} at position {at} is outside 0 to {config.vocab_size - 1}")
    if ids.size > config.max_position_embeddings:
        raise TokenError(f"{ids.size} tokens are more than the model's {config.max_position_embeddings} positions")
    return ids.astype(np.int32)


def forward(
    model: Model, token_ids: Sequence[int] | Int[np.ndarray, " T"], media: Sequence[Media] = ()
) -> Float[Array, "T V"]:
    """Logits [T, vocab], float32, of the token after each position; no cache is kept.

    `media`: images and videos, in the order of their placeholders. Raises TokenError.
    """
    ids = check_tokens(token_ids, model.config)
    inputs = _media_inputs(model, ids, media)
    chunk = min(FORWARD_CHUNK, max(16, 1 << (ids.size - 1).bit_length()))
    pages = -(-ids.size // FORWARD_PAGE) + -(-chunk // FORWARD_PAGE)
    pages = 1 << (pages - 1).bit_length()
    pool = pool_arrays(model.layout, 2, pages + 1, FORWARD_PAGE, model.pool_places)
    table, slot = jnp.arange(1, pages + 1, dtype=jnp.int32)[None], jnp.ones(1, jnp.int32)
    logits = []
    for start in range(0, ids.size, chunk):
        part = ids[start : start + chunk]
        address = BatchAddress(jnp.full(1, start), jnp.full(1, part.size), table, slot, slot)
        tokens = np.pad(part, (0, chunk - part.size))[None]
        seen = None if inputs is None else inputs.window(start, chunk)
        scores, pool = model._chunk_logits(model.parameters, pool, tokens, address, seen)
        logits.append(scores[0, : part.size])
    return jnp.concatenate(logits)


def _media_inputs(model: Model, ids: Int[np.ndarray, " T"], media: Sequence[Media]) -> MediaInputs | None:
    """Of one row with all of the tokens; None without images."""
    placed = place(ids, media, model.config.vision)
    if not placed:
        return None
    embeddings = np.zeros((ids.size, model.config.hidden_size), jnp.dtype(model.dtypes.cache))
    present = np.zeros(ids.size, np.bool_)
    for each in placed:
        where = slice(each.span.start, each.span.start + each.span.size)
        embeddings[where], present[where] = model.embed_frame(each.frame), True
    positions = rope_positions(ids.size, [each.span for each in placed])[0]
    return MediaInputs(jnp.asarray(embeddings[None]), jnp.asarray(present[None]), jnp.asarray(positions[:, None]))


def _chunk_logits(
    graph: nnx.GraphDef,
    parameters: nnx.State,
    pool: PoolArrays,
    tokens: Int[Array, "1 C"],
    address: BatchAddress,
    media: MediaInputs | None,
) -> tuple[Float[Array, "1 C V"], PoolArrays]:
    decoder: Decoder = nnx.merge(graph, parameters)
    outputs, pool = decoder.trunk(tokens, pool, address, media)
    return decoder.logits(outputs), pool

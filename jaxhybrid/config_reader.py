"""Reads a published config.json key by key; refuses keys that nobody asked for, and values of another kind."""

from collections.abc import Mapping
from typing import Any

from jaxhybrid.errors import ConfigError
from jaxhybrid.key_kinds import KINDS, OBJECT, Kind

# What transformers may write into any config, whatever the model: the file's history, labels of classes, what a call
# returns, and defaults of generation, which `generation.py` reads from generation_config.json alone.
GENERIC_KEYS = frozenset(
    {
        *("architectures", "auto_map", "transformers_version", "torch_dtype", "dtype", "_name_or_path", "name_or_path"),
        *("attn_implementation", "_attn_implementation", "transformers.js_config", "torchscript", "use_bfloat16"),
        *("tf_legacy_loss", "finetuning_task", "task_specific_params", "problem_type", "id2label", "label2id"),
        *("tokenizer_class", "prefix", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
        *("use_cache", "cache_implementation", "return_dict", "output_hidden_states", "output_attentions"),
        *("return_dict_in_generate", "output_scores", "remove_invalid_values", "num_return_sequences"),
        *("do_sample", "temperature", "top_k", "top_p", "typical_p", "max_length", "min_length", "early_stopping"),
        *("num_beams", "num_beam_groups", "diversity_penalty", "length_penalty", "repetition_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty"),
        *("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"),
    }
)

# Keys that change no forward pass: those, and what describes training or how to compute the same.
INERT_KEYS = GENERIC_KEYS | {
    *("initializer_range", "attention_dropout", "hidden_dropout", "output_router_logits", "router_aux_loss_coef"),
    *("aux_loss_alpha", "seq_aux", "z_loss_coefficient", "ignore_index", "ep_size", "pretraining_tp"),
    *("max_window_layers", "num_logits_to_keep", "use_mamba_kernels", "use_mambapy", "use_associative_scan"),
    *("rescale_prenorm_residual", "is_llama_config"),
    # How tensors are stored: checkpoint/dequantise.py reads it, and refuses what it does not know.
    *("quantization_config", "expert_dtype"),
}

# Generic keys that change nothing at this one value. Another would ask for a model that is not implemented.
NEUTRAL_VALUES: Mapping[str, Any] = {
    "is_decoder": False,
    "is_encoder_decoder": False,
    "tie_encoder_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "pruned_heads": {},
    "chunk_size_feed_forward": 0,
}


class ConfigReader:
    """Every key is taken once; `finish` names the keys nobody took."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._left = dict(values)
        self._where = where

    def __contains__(self, name: str) -> bool:
        """Whether the key is there and was not taken yet."""
        return name in self._left

    def take(self, *names: str, default: Any = ..., nullable: bool = False) -> Any:
        """The value of the first name present. Later spellings of the same thing must agree with it.

        Every value must be of its key's kind (key_kinds.py). Null is one where `default` is None, or if `nullable`:
        where it says something that leaving the key out does not.
        """
        for name in names:
            self._check_kind(name, KINDS.get(name), nullable or default is None)
        return self._pop(names, default)

    def _check_kind(self, name: str, kind: Kind | None, nullable: bool = False) -> None:
        value = self._left.get(name)
        if name in self._left and kind is not None and not (kind.holds(value) or (nullable and value is None)):
            raise self.error(f"{name}: expected {kind.expected}{' or null' if nullable else ''}, got {value!r}")

    def _pop(self, names: tuple[str, ...], default: Any) -> Any:
        found = {name: self._left.pop(name) for name in names if name in self._left}
        if not found:
            if default is ...:
                raise self.error(f"expected key {' or '.join(map(repr, names))}, found none")
            return default
        first, *others = found.items()
        for name, value in others:
            if value != first[1]:
                raise self.error(f"{first[0]}={first[1]!r} contradicts {name}={value!r}")
        return first[1]

    def agree(self, outer: "ConfigReader", name: str) -> None:
        """Takes over a key that the whole model's config may say instead of this part's. Both must say the same."""
        value = outer.take(name, default=None)
        if value is not None and self._left.setdefault(name, value) != value:
            raise self.error(f"{name}={self._left[name]!r} contradicts {value!r} outside of it")

    def require(self, name: str, *allowed: Any, default: Any = ...) -> None:
        """The key may only have one of the `allowed` values, because nothing else is implemented."""
        value = self._pop((name,), allowed[0] if default is ... else default)
        # Python takes true for 1.
        if not any(value == option and isinstance(value, bool) == isinstance(option, bool) for option in allowed):
            options = " or ".join(map(repr, allowed))
            raise self.error(f"{name}={value!r} is not supported, expected {options}")

    def nested(self, name: str) -> "ConfigReader":
        """A reader of the object under that key."""
        self._check_kind(name, OBJECT)
        return self.within(name, self.take(name))

    def within(self, name: str, values: Mapping[str, Any]) -> "ConfigReader":
        """A reader of other values, which errors place at `name` of this file."""
        return ConfigReader(values, f"{self._where}: {name}")

    def rope(self) -> "ConfigReader":
        """A reader of `rope_parameters`, or of the older `rope_theta`, `rope_scaling` and `partial_rotary_factor`.

        `models/rope_keys.py` makes a RopeSpec of it.
        """
        sources = [self.take(name, default=None) or {} for name in ("rope_parameters", "rope_scaling")]
        for name in ("rope_theta", "partial_rotary_factor"):
            value = self.take(name, default=None)
            sources.append({} if value is None else {name: value})
        merged: dict[str, Any] = {}
        for source in sources:
            for name, value in source.items():
                key = "rope_type" if name == "type" else name
                if merged.setdefault(key, value) != value:
                    raise self.error(f"{key}={merged[key]!r} contradicts {name}={value!r}")
        return self.within("rope parameters", merged)

    def error(self, message: str) -> ConfigError:
        """An error that names the file."""
        return ConfigError(f"{self._where}: {message}")

    def finish(self) -> None:
        """Raises ConfigError for a key nobody took, unless it changes no forward pass, at this value or at any."""
        for name, value in NEUTRAL_VALUES.items():
            self.require(name, value)
        unknown = sorted(set(self._left) - INERT_KEYS)
        if unknown:
            raise self.error(f"unknown keys {', '.join(unknown)}: what they change is not known")


def end_tokens(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)

"""Writes tests/goldens: tiny random checkpoints in the published formats, with the reference implementation's logits.

Regenerate with the `oracle` extra (torch from a CPU wheel, then transformers):

    python scripts/make_goldens.py                      # all of them, about a minute
    python scripts/make_goldens.py --only qwen3_a

Each folder holds `config.json` (key style of the released checkpoint), `model.safetensors` (or shards with an index),
and `golden.npz`:

    input_ids       [2,320] int32
    logits          [2,320,V] float32, one forward pass over all tokens without a cache, eager attention
    prefill_length  scalar int32: the prompt is input_ids[:, :prefill_length]
    greedy          [2,64] int32, greedy continuation of that prompt
    mtp_logits      [2,319,V] float32, only with a prediction layer: row t predicts token t+2
    vl_*            only of models that see: golden_images.py

`transformers` is the reference, except where a family's file in golden_configs/ names one of ours.
"""

import json
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from absl import app, flags, logging
from golden import Config, Forward, Golden, Tensors

BATCH, LENGTH, PREFILL, GREEDY = 2, 320, 200, 64
PLACEHOLDERS = ("image_token_id", "video_token_id", "media_placeholder_token_id")
FIRST_ORDINARY_TOKEN = 3  # 0 to 2 are padding, start and end
MAX_FOLDER_BYTES = 1_500_000
# Two correct float32 implementations differ by rounding. A greedy step or a router that is nearly tied would turn that
# into different tokens, so a seed is refused unless float32 and float64 runs agree this well (relative to the logits'
# standard deviation) and every greedy choice has this much of a lead.
MAX_ROUNDING = 2e-5
MIN_LEAD = 2e-3

_OUT = flags.DEFINE_string("out", "tests/goldens", "Folder that receives one folder per golden.")
_ONLY = flags.DEFINE_list("only", [], "Names of the goldens to make; all when empty.")
_SEED = flags.DEFINE_integer("seed", 20, "First seed to try for each golden.")


def random_tensor(golden: Golden, name: str, shape: tuple[int, ...], generator):
    """A value away from the initial constant for every kind of parameter, of a size that keeps activations near one."""
    import torch

    if (own := golden.random(name, shape, generator)) is not None:
        return own

    def normal(mean: float, std: float):
        return torch.randn(shape, generator=generator) * std + mean

    leaf = name.rsplit(".", 1)[-1]
    if leaf == "A_log":  # decay rates over two decades: heads that forget in a few tokens, heads that remember hundreds
        return torch.empty(shape).uniform_(-4.6, 0.0, generator=generator)
    if leaf == "dt_bias":
        return normal(-1.0, 0.7)
    if leaf == "e_score_correction_bias":
        return normal(0.0, 0.15)
    if leaf == "bias":
        return normal(0.0, 0.25)
    if len(shape) == 1:
        initial = 0.0 if golden.zero_centred(name) else 1.0
        if golden.config.get("tie_word_embeddings") and name.endswith(("model.norm.weight", "shared_head.norm.weight")):
            # A scale of either sign, or a tied head would only ever repeat the token it was given.
            return normal(initial - 1.0, 1.0)
        return normal(initial, 0.25)
    if "conv1d" in name:
        return normal(0.0, 0.5)
    if "embed_tokens" in name:
        return normal(0.0, 1.0)
    router = re.search(r"(mlp|block_sparse_moe)\.gate\.weight$", name)
    return normal(0.0, (1.5 if router else 1.0) / shape[-1] ** 0.5)


def transformers_tensors(golden: Golden, seed: int) -> Tensors:
    """A randomised model's tensors under their published names."""
    import torch
    import transformers
    from safetensors.torch import load_file

    model_class = getattr(transformers, golden.config["architectures"][0])
    model = model_class(model_class.config_class.from_dict(dict(golden.config)))
    generator = torch.Generator().manual_seed(seed)
    named = dict(model.named_parameters())
    named |= {name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()}
    with torch.no_grad():
        for name, tensor in named.items():
            tensor.copy_(random_tensor(golden, name, tuple(tensor.shape), generator))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return golden.as_published(load_file(Path(folder) / "model.safetensors"))


def reference_tensors(golden: Golden, seed: int) -> Tensors:
    import torch

    assert golden.reference is not None
    generator = torch.Generator().manual_seed(seed)
    shapes = golden.reference.shapes(golden.config)
    return {name: random_tensor(golden, name, shape, generator) for name, shape in shapes.items()}


def load_forward(folder: Path, golden: Golden, double: bool) -> Forward:
    """The reference forward pass of the checkpoint as written, in float32 or float64."""
    import torch

    config = json.loads((folder / "config.json").read_text())
    dtype = torch.float64 if double else torch.float32
    tensors = golden.loaded(read_tensors(folder))
    if golden.reference is not None:
        return golden.reference.forward(config, {name: tensor.to(dtype) for name, tensor in tensors.items()})
    model = load_transformers(folder, config, tensors, dtype)
    if (mtp := golden.mtp) is None:
        return lambda input_ids: (model(input_ids, use_cache=False).logits, None)
    wide = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}

    def forward(input_ids: Any) -> tuple[Any, Any]:
        made = model(input_ids, use_cache=False, output_hidden_states=True)
        return made.logits, mtp(config, wide, input_ids, made.hidden_states[-1])

    return forward


def load_transformers(folder: Path, config: Config, tensors: Tensors, dtype: Any) -> Any:
    """The model in `folder`; of quantised tensors, which want packages or devices of their own, their plain values."""
    import transformers

    if "quantization_config" in config:
        plain = {key: value for key, value in config.items() if key != "quantization_config"}
        with tempfile.TemporaryDirectory() as temporary:
            write_checkpoint(Path(temporary) / folder.name, plain, tensors, shards=1)
            return load_transformers(Path(temporary) / folder.name, plain, tensors, dtype)
    model_class = getattr(transformers, config["architectures"][0])
    model, loading = model_class.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    problems = {key: value for key, value in loading.items() if value}
    if problems:
        raise ValueError(f"{folder}: transformers does not load it as written: {problems}")
    return model.eval()


def read_tensors(folder: Path) -> Tensors:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def write_checkpoint(folder: Path, config: Config, tensors: Tensors, shards: int) -> None:
    from safetensors.torch import save_file

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {
        name: f"model-{i * shards // len(names) + 1:05d}-of-{shards:05d}.safetensors" for i, name in enumerate(names)
    }
    for file in sorted(set(weight_map.values())):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, folder / file, metadata={"format": "pt"})
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def greedy_continuation(forward: Forward, prompt, config: Config) -> tuple[Any, float]:
    """Greedy tokens [B,GREEDY] without a cache, and the smallest lead of a chosen logit over the runner-up.

    An image's placeholder is no text, and never chosen.
    """
    import torch

    never = [config[key] for key in PLACEHOLDERS if key in config]
    ids, lead = prompt, float("inf")
    for _ in range(GREEDY):
        logits = forward(ids)[0][:, -1].clone()
        logits[:, never] = -torch.inf
        best = logits.topk(2, -1)
        lead = min(lead, (best.values[:, 0] - best.values[:, 1]).min().item())
        ids = torch.cat([ids, best.indices[:, :1]], -1)
    return ids[:, prompt.shape[1] :], lead


def check_second_reference(folder: Path, golden: Golden, input_ids: Any, logits: Any) -> None:
    """A reference of ours has to equal transformers wherever both apply."""
    import torch

    assert golden.second_reference is not None
    with torch.no_grad():
        ours = golden.second_reference.forward(golden.config, golden.loaded(read_tensors(folder)))(input_ids)[0]
    worst = ((ours - logits).abs().max() / logits.std()).item()
    logging.info("%s: our reference differs from transformers by %.1e", folder.name, worst)
    if worst > MAX_ROUNDING:
        raise ValueError(f"{folder}: our reference differs from transformers by {worst:.1e} of the logits' deviation")


def make_golden(folder: Path, golden: Golden, seed: int) -> str | None:
    """Writes one golden; returns why this seed will not do, or None."""
    import numpy as np
    import torch

    config = golden.config
    make_tensors = reference_tensors if golden.reference is not None else transformers_tensors
    write_checkpoint(folder, config, golden.stored(make_tensors(golden, seed)), golden.shards)
    generator = torch.Generator().manual_seed(seed + 1)
    vocabulary = config.get("text_config", config)["vocab_size"]
    input_ids = torch.randint(FIRST_ORDINARY_TOKEN, vocabulary, (BATCH, LENGTH), generator=generator)
    with torch.no_grad():
        forward = load_forward(folder, golden, double=False)
        logits, mtp_logits = forward(input_ids)
        exact, _ = load_forward(folder, golden, double=True)(input_ids)
        greedy, lead = greedy_continuation(forward, input_ids[:, :PREFILL], config)
    std = logits.std().item()
    rounding, lead = (logits - exact).abs().max().item() / std, lead / std
    logging.info("%s seed %d: deviation %.2f, rounding %.1e, lead %.1e", folder.name, seed, std, rounding, lead)
    if rounding > MAX_ROUNDING or lead < MIN_LEAD:
        return f"rounding {rounding:.1e}, smallest greedy lead {lead:.1e}"
    if golden.second_reference is not None:
        check_second_reference(folder, golden, input_ids, logits)
    arrays = {"input_ids": input_ids.int(), "logits": logits, "greedy": greedy.int()}
    if mtp_logits is not None:
        arrays["mtp_logits"] = mtp_logits
    saved = {name: array.numpy() for name, array in arrays.items()}
    if golden.further is not None:
        with torch.no_grad():
            if golden.reference is None:
                forward = load_transformers(folder, config, golden.loaded(read_tensors(folder)), torch.float32)
            further = golden.further(forward, config, seed)
        if further is None:
            return "a tie among what the golden has further"
        saved |= further
    np.savez_compressed(folder / "golden.npz", prefill_length=np.int32(PREFILL), **saved)
    size = sum(file.stat().st_size for file in folder.iterdir())
    if size > MAX_FOLDER_BYTES:
        raise ValueError(f"{folder}: {size} bytes, more than {MAX_FOLDER_BYTES}")
    logging.info("%s: %d bytes, greedy %s...", folder.name, size, greedy[0, :8].tolist())
    return None


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    import torch
    from golden_configs import GOLDENS  # the references among them need torch

    unknown = sorted(set(_ONLY.value) - set(GOLDENS))
    if unknown:
        raise app.UsageError(f"unknown goldens {unknown}; there are {sorted(GOLDENS)}")
    torch.set_num_threads(1)
    for name in _ONLY.value or GOLDENS:
        folder = Path(_OUT.value) / name
        for seed in range(_SEED.value, _SEED.value + 20):
            if (refusal := make_golden(folder, GOLDENS[name], seed)) is None:
                break
            logging.info("%s seed %d refused: %s", name, seed, refusal)
        else:
            raise ValueError(f"{name}: no seed from {_SEED.value} on gives a well-conditioned golden")


if __name__ == "__main__":
    app.run(main)

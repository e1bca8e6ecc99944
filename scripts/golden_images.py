"""Prompts with images and a video through transformers, for goldens of models that see."""

from collections.abc import Callable
from typing import Any

import torch
from golden import Config
from torch import Tensor
from torch.nn import functional as F

IMAGES, VIDEO = [(1, 4, 6), (1, 6, 4)], (2, 4, 8)  # grids (time, height, width) in patches
TEXT = 20  # tokens before, between and after them
STEPS = 24
MIN_LEAD = 2e-3  # of the logits' standard deviation, as for other greedy tokens


def image_arrays(model: Any, config: Config, seed: int) -> dict[str, Any] | None:
    """What the model makes of one prompt with two images and a video; None if a greedy step is nearly tied.

    vl_input_ids      [N] int32, a placeholder for each embedding
    vl_patches        [P,F] float32, of both images and then the video
    vl_grids          [3,3] int32, (time, height, width) of each, in patches
    vl_embeddings     [M,D] float32, the tower's output, in the order of vl_patches
    vl_position_ids   [3,N] int32, MRoPE positions of the prompt; vl_rope_delta: position minus index after it
    vl_logits         [N,V] float32
    vl_greedy         [24] int32, greedy continuation; vl_decode [24,V]: the logits that each was chosen from
    vl_pixels         [40,52,3] uint8, and vl_resized [36,60,3] uint8: bicubic with antialiasing
    """
    generator = torch.Generator().manual_seed(seed)
    ids, media = prompt_with_media(config, generator)

    def logits_of(tokens: Tensor) -> Tensor:
        kind = kinds(config, tokens, len(ids))
        return model(input_ids=tokens, mm_token_type_ids=kind, use_cache=False, **media).logits[0]

    continued = greedy(logits_of, ids)
    if continued is None:
        return None
    logits, chosen, decoded = continued
    prompt = torch.tensor([ids])
    grids = {name: grid for name, grid in media.items() if name.endswith("grid_thw")}
    positions, delta = model.model.get_rope_index(prompt, mm_token_type_ids=kinds(config, prompt, len(ids)), **grids)
    images = media["pixel_values"], media["image_grid_thw"]
    video = media["pixel_values_videos"], media["video_grid_thw"]
    embeddings = [torch.cat(list(model.model.get_image_features(*each).pooler_output)) for each in (images, video)]
    pixels = torch.randint(0, 256, (40, 52, 3), generator=generator, dtype=torch.uint8)
    resized = F.interpolate(
        pixels.permute(2, 0, 1)[None].float(), (36, 60), mode="bicubic", antialias=True, align_corners=False
    )
    arrays = {
        "input_ids": prompt[0].int(), "patches": torch.cat([images[0], video[0]]),
        "grids": torch.cat([images[1], video[1]]).int(), "embeddings": torch.cat(embeddings),
        "position_ids": positions[:, 0].int(), "rope_delta": delta[0, 0].int(), "logits": logits,
        "greedy": chosen.int(), "decode": decoded, "pixels": pixels,
        "resized": resized[0].permute(1, 2, 0).round().clamp(0, 255).to(torch.uint8),
    }  # fmt: skip
    return {f"vl_{name}": array.detach().numpy() for name, array in arrays.items()}


def prompt_with_media(config: Config, generator: torch.Generator) -> tuple[list[int], dict[str, Tensor]]:
    """Token ids, and what transformers takes beside them."""
    vision = config["vision_config"]
    merge, features = vision["spatial_merge_size"] ** 2, 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    vocabulary = config["text_config"]["vocab_size"]

    def text(count: int) -> list[int]:
        return torch.randint(5, vocabulary, (count,), generator=generator).tolist()

    def placed(token: int, height: int, width: int) -> list[int]:
        content = [token] * (height * width // merge)
        return [config["vision_start_token_id"], *content, config["vision_end_token_id"]]

    ids = text(TEXT) + placed(config["image_token_id"], *IMAGES[0][1:]) + text(TEXT)
    for _ in range(VIDEO[0]):  # a video's frames stand one by one, a time stamp before each
        ids += text(3) + placed(config["video_token_id"], *VIDEO[1:])
    ids += text(2) + placed(config["image_token_id"], *IMAGES[1][1:]) + text(TEXT)
    return ids, {
        "pixel_values": torch.randn(sum(t * h * w for t, h, w in IMAGES), features, generator=generator),
        "image_grid_thw": torch.tensor(IMAGES),
        "pixel_values_videos": torch.randn(VIDEO[0] * VIDEO[1] * VIDEO[2], features, generator=generator),
        "video_grid_thw": torch.tensor([VIDEO]),
    }


def kinds(config: Config, tokens: Tensor, prompt_length: int) -> Tensor:
    """1 for images and 2 for video; a placeholder that the model itself chose is a token like others."""
    made = torch.arange(tokens.shape[1]) >= prompt_length
    kind = (tokens == config["image_token_id"]).int() + 2 * (tokens == config["video_token_id"]).int()
    return kind.masked_fill(made, 0)


def greedy(logits_of: Callable[[Tensor], Tensor], ids: list[int]) -> tuple[Tensor, Tensor, Tensor] | None:
    """The prompt's logits, the tokens that follow, and the logits each was chosen from; None for a tie.

    logits_of: tokens [1,T] that begin with the prompt -> [T,V].
    """
    tokens, chosen, decoded = torch.tensor([ids]), [], []
    first = logits = logits_of(tokens)
    for _ in range(STEPS):
        best = logits[-1].topk(2)
        if (best.values[0] - best.values[1]) / first.std() < MIN_LEAD or best.indices[0] < 2:
            return None
        decoded.append(logits[-1])
        chosen.append(best.indices[0])
        tokens = torch.cat([tokens, best.indices[None, :1]], 1)
        logits = logits_of(tokens)
    return first, torch.stack(chosen), torch.stack(decoded)

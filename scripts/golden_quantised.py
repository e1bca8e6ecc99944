"""How released checkpoints store weights in few bits, for goldens in those formats: FP4 in groups, FP8 in blocks."""

import torch
from torch import Tensor
from torch.nn import functional as F

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
GROUP = 32  # weights that share a power of two
BIAS = 127  # of the power's stored exponent

Block = tuple[int, int]  # rows and columns that share a scale


def to_fp4(weights: Tensor) -> tuple[Tensor, Tensor]:
    """[.., in] -> two codes a byte [.., in / 2], the low nibble first, and exponents [.., in / 32], both uint8.

    Each value is the nearest that its group's power of two can hold.
    """
    groups = weights.unflatten(-1, (-1, GROUP))
    exponent = torch.floor(torch.log2(groups.abs().amax(-1))) - 2
    codes = ((groups / torch.exp2(exponent)[..., None])[..., None] - FP4).abs().argmin(-1).to(torch.uint8)
    codes = codes.flatten(-2)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponent + BIAS).to(torch.uint8)


def from_fp4(packed: Tensor, exponents: Tensor) -> Tensor:
    """The values that `to_fp4` stands for, float32 [.., in]."""
    values = FP4[torch.stack([packed & 15, packed >> 4], -1).flatten(-2).long()]
    return (values.unflatten(-1, (-1, GROUP)) * torch.exp2(exponents.float() - BIAS)[..., None]).flatten(-2)


def fp8_scales(weights: Tensor, block: Block) -> Tensor:
    """[out, in] -> the scale of each block with which its largest weight is FP8's largest value."""
    rows, columns = weights.shape
    padded = F.pad(weights, (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    return blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max


def to_fp8(weights: Tensor, scales: Tensor, block: Block) -> Tensor:
    return (weights / _spread(scales, weights.shape, block)).to(torch.float8_e4m3fn)


def from_fp8(stored: Tensor, scales: Tensor, block: Block) -> Tensor:
    """The values that FP8 weights and their scales stand for, float32."""
    return stored.float() * _spread(scales.float(), stored.shape, block)


def _spread(scales: Tensor, shape: torch.Size, block: Block) -> Tensor:
    """Each block's scale at each of its weights."""
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return wide[: shape[0], : shape[1]]

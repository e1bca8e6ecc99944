"""Bits per byte of the demo model on held-out text, beside a general compressor on the same text."""

import lzma
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from jaxhybrid.demo.corpus import Document
from jaxhybrid.model import Model, forward

WINDOW = 8192
XZ_PRESET = 9


@dataclass(frozen=True)
class Score:
    """What a held-out set costs, in bits per byte of its text."""

    documents: int
    text_bytes: int
    tokens: int
    model_bits_per_byte: float
    xz_bits_per_byte: float


def evaluate(model: Model, documents: Sequence[Document]) -> Score:
    """Both get the documents joined end to end; the model in windows of `WINDOW` tokens, each from an empty state."""
    joined = "".join(f"<|endoftext|>{document.text}" for document in documents)
    stream = np.asarray(model.tokenizer.encode(joined), np.int32)
    windows = [stream[start : start + WINDOW] for start in range(0, len(stream), WINDOW)]
    text = "".join(document.text for document in documents).encode()
    return Score(
        documents=len(documents),
        text_bytes=len(text),
        tokens=len(stream),
        model_bits_per_byte=sum(bits(model, window) for window in windows) / len(text),
        xz_bits_per_byte=8 * len(lzma.compress(text, preset=XZ_PRESET)) / len(text),
    )


def bits(model: Model, window: Int32[np.ndarray, " T"]) -> float:
    """Bits that the window's tokens cost, each given all before it; the first counts as if all were equally likely."""
    log_likelihood = jax.nn.log_softmax(forward(model, window)[:-1])
    rest = jnp.take_along_axis(log_likelihood, window[1:, None], axis=1).sum()
    return math.log2(model.config.vocab_size) - float(rest) / math.log(2)

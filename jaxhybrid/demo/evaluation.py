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
    """The model starts every document afresh; xz gets all of them in one piece, joined end to end."""
    streams = [np.asarray(model.tokenizer.encode(f"<|endoftext|>{document.text}"), np.int32) for document in documents]
    text = "".join(document.text for document in documents).encode()
    return Score(
        documents=len(documents),
        text_bytes=len(text),
        tokens=sum(len(stream) - 1 for stream in streams),
        model_bits_per_byte=sum(bits(model, stream) for stream in streams) / len(text),
        xz_bits_per_byte=8 * len(lzma.compress(text, preset=XZ_PRESET)) / len(text),
    )


def bits(model: Model, stream: Int32[np.ndarray, " T"]) -> float:
    """Bits that all tokens but the first cost, each given all before it."""
    log_likelihood = jax.nn.log_softmax(forward(model, stream)[:-1])
    return -float(jnp.take_along_axis(log_likelihood, stream[1:, None], axis=1).sum()) / math.log(2)

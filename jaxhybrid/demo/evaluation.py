"""Bits per byte of the demo model on held-out text, beside a general compressor on the same text."""

import lzma
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxhybrid.demo.corpus import Document
from jaxhybrid.model import Model, forward

WINDOW = 2048
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
    streams = [model.tokenizer.encode(f"<|endoftext|>{document.text}") for document in documents]
    bits = sum(document_bits(model, np.asarray(stream, np.int32)) for stream in streams)
    text = "".join(document.text for document in documents).encode()
    return Score(
        documents=len(documents),
        text_bytes=len(text),
        tokens=sum(len(stream) - 1 for stream in streams),
        model_bits_per_byte=bits / len(text),
        xz_bits_per_byte=8 * len(lzma.compress(text, preset=XZ_PRESET)) / len(text),
    )


def document_bits(model: Model, stream: np.ndarray, window: int = WINDOW) -> float:
    """Bits of all tokens but the first, in windows that overlap by half: each token sees at least half a window."""
    bits, known = 0.0, 1
    while known < len(stream):
        start = max(0, known - window // 2)
        part = stream[start : start + window]
        log_likelihood = jax.nn.log_softmax(forward(model, part)[:-1])
        scored = jnp.take_along_axis(log_likelihood, part[1:, None], axis=1)[known - start - 1 :]
        bits -= float(scored.sum()) / math.log(2)
        known = start + len(part)
    return bits

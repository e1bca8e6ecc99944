"""A whole training run: corpus and tokenizer, the loop over steps, and checkpoints to go on from."""

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import UInt16
from tokenizers import Tokenizer

from jaxhybrid.demo.corpus import conversation_documents, library_documents, token_stream, training_batches
from jaxhybrid.demo.tokenizer import train_tokenizer
from jaxhybrid.demo.training import Recipe, make_optimiser, make_step
from jaxhybrid.demo.training_model import Parameters, initial_parameters
from jaxhybrid.demo.trajectories import training_trajectories

REPORT_EVERY = 10
SAVE_EVERY = 50


def prepare(recipe: Recipe) -> tuple[Tokenizer, UInt16[np.ndarray, " tokens"]]:
    """The tokenizer, and the training text as tokens: library and conversations in one shuffled stream."""
    documents = [document for document in library_documents() if not document.held_out]
    documents += conversation_documents(training_trajectories(recipe.training_conversations))
    tokenizer = train_tokenizer(document.text for document in documents)
    random.Random(recipe.seed).shuffle(documents)
    return tokenizer, token_stream(tokenizer, documents)


def train(
    recipe: Recipe, stream: UInt16[np.ndarray, " tokens"], checkpoint: Path, report: Callable[[str], None]
) -> Parameters:
    """Train to the recipe's last step, from `checkpoint` on if it exists."""
    optimiser = make_optimiser(recipe)
    step_function = make_step(recipe, optimiser)
    parameters = initial_parameters(jax.random.key(recipe.seed))
    state = optimiser.init(parameters)
    done = 0
    if checkpoint.exists():
        done, (parameters, state) = _load(checkpoint, (parameters, state))
    started, first = time.monotonic(), done
    while done < recipe.steps:
        window, until = recipe.phase(done)
        batches = training_batches(stream, window, recipe.batch_tokens // window, recipe.seed, done)
        for number, tokens in zip(range(done, until), batches, strict=False):
            batch = jnp.asarray(tokens, jnp.int32)
            parameters, state, figures = step_function(parameters, state, batch, jnp.int32(number))
            done = number + 1
            if done % REPORT_EVERY == 0:
                pace = (done - first) * recipe.batch_tokens / (time.monotonic() - started)
                values = ", ".join(f"{name} {float(value):.3f}" for name, value in figures.items())
                report(f"step {done} of {recipe.steps}: {values}, {pace:.0f} tokens/s")
            if done % SAVE_EVERY == 0 or done == recipe.steps:
                _save(checkpoint, done, (parameters, state))
    report(f"{done - first} steps took {time.process_time() / 60:.0f} CPU minutes")
    return parameters


def _save(path: Path, step: int, tree: Any) -> None:
    partial = path.with_suffix(".partial.npz")
    np.savez(partial, np.asarray(step), *(np.asarray(leaf) for leaf in jax.tree.leaves(tree)))
    os.replace(partial, path)


def _load(path: Path, like: Any) -> tuple[int, Any]:
    like_leaves, structure = jax.tree.flatten(like)
    with np.load(path) as saved:
        step, *leaves = (saved[f"arr_{i}"] for i in range(len(like_leaves) + 1))
    return int(step), jax.tree.unflatten(structure, [jnp.asarray(leaf) for leaf in leaves])

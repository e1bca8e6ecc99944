"""Train the demo model, or evaluate the one that ships: held-out bits per byte beside xz -9 on the same text."""

from pathlib import Path

from absl import app, flags

from jaxhybrid.command_line import run

_OUT = flags.DEFINE_string(
    "out", "jaxhybrid/demo", "Folder of the checkpoint: written by training, read by --evaluate."
)
_WORK = flags.DEFINE_string(
    "work", "build/demo", "Folder for training's own checkpoints; a later run goes on from them."
)
_EVALUATE = flags.DEFINE_boolean("evaluate", False, "Evaluate instead of training.")
_STEPS = flags.DEFINE_integer("steps", None, "Steps to train, in place of the recipe's.", lower_bound=2)


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if _EVALUATE.value:
        _evaluate(Path(_OUT.value))
    else:
        _train(Path(_OUT.value), Path(_WORK.value))


def _evaluate(folder: Path) -> None:
    from jaxhybrid.demo.corpus import library_documents, shipped_conversations
    from jaxhybrid.demo.evaluation import evaluate
    from jaxhybrid.model import load_model

    model = load_model(folder)
    print(f"parameters: {model.parameter_count:,}")
    held_out = {
        "standard library": [document for document in library_documents() if document.held_out],
        "agent conversations": list(shipped_conversations()),
    }
    for name, documents in held_out.items():
        score = evaluate(model, documents)
        print(
            f"{name}: {score.documents} documents, {score.text_bytes:,} bytes, {score.tokens:,} tokens: "
            f"model {score.model_bits_per_byte:.3f} bits per byte, xz -9 {score.xz_bits_per_byte:.3f}"
        )


def _train(out: Path, work: Path) -> None:
    from dataclasses import replace

    from jaxhybrid.demo.export import export
    from jaxhybrid.demo.tokenizer import save_tokenizer
    from jaxhybrid.demo.training import Recipe
    from jaxhybrid.demo.training_run import prepare, train

    recipe = Recipe() if _STEPS.value is None else replace(Recipe(), steps=_STEPS.value, decay_steps=_STEPS.value // 5)
    work.mkdir(parents=True, exist_ok=True)
    tokenizer, stream = prepare(recipe)
    parameters = train(recipe, stream, work / "training.npz", print)
    export(parameters, out)
    save_tokenizer(tokenizer, out)


if __name__ == "__main__":
    run(main)

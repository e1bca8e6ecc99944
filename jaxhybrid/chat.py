"""From conversations to token ids and back: tokenizer, chat template, and what both do to a prefix."""

import hashlib
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from jaxhybrid.chat_formats import ChatFormat, format_of
from jaxhybrid.chat_formats.control_text import control, pieces, unmarked
from jaxhybrid.chat_messages import REASONING_KEYS, Message, Switches, Tool, check_response
from jaxhybrid.chat_template import ChatTemplate
from jaxhybrid.errors import TemplateError, TokenError
from jaxhybrid.text_tokenizer import TOKENIZER_CONFIG, TOKENIZER_JSON, JsonTokenizer, TextTokenizer
from jaxhybrid.tiktoken_tokenizer import TIKTOKEN_MODEL, TiktokenTokenizer

OPEN_THINKING = "<think>"
# A character has at most four bytes, so within four tokens two equal byte-level sequences reach a character's start.
CHARACTER_TOKENS = 4


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation with its generation prompt.

    turn_start: tokens before the generation prompt, where a history whose reasoning is stripped later resumes.
    message_start: tokens before the last message, where a conversation that differs from this one in it resumes; 0 if
        it is the only one.
    """

    token_ids: tuple[int, ...]
    turn_start: int
    text: str
    message_start: int = 0


@dataclass(frozen=True)
class Remembered:
    """A prompt that was processed and the response that was sampled after it, end token left out."""

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]


class ChatTokenizer:
    """The tokenizer and chat templates of one checkpoint folder. Immutable; safe to share."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        templates: Mapping[str, ChatFormat],
        end_token_ids: Sequence[int],
        fingerprint: str,
        place: str,
    ) -> None:
        self._tokenizer = tokenizer
        self._templates = dict(templates)
        self._place = place
        self._marks_controls = any(template.marks_controls for template in templates.values())
        self.vocab_size = max(tokenizer.ids) + 1
        self._holes = frozenset(range(self.vocab_size)).difference(tokenizer.ids)
        self.fingerprint = fingerprint
        self.end_token_ids = tuple(dict.fromkeys(self._checked_ids(end_token_ids, "end token ids")))
        self._end_texts = tuple(self.rendered_text([token_id]) for token_id in self.end_token_ids)

    @classmethod
    def from_folder(cls, path: str | Path, clock: Callable[[], datetime] = datetime.now) -> "ChatTokenizer":
        """Reads `tokenizer.json` or `tiktoken.model`, `tokenizer_config.json`, `chat_template.jinja` and end tokens.

        Without a template the format is that of `config.json`'s model_type, and without one of those either a folder
        still encodes and decodes. `clock` is what templates with a date in the prompt read.
        Raises TokenError for tokenizer files that are missing or unreadable, TemplateError for an invalid template.
        """
        folder = Path(path)
        settings = _read_json(folder / TOKENIZER_CONFIG)
        tokenizer, tokenizer_bytes = _read_tokenizer(folder, settings)
        special = _special_tokens(folder, settings)
        sources = _template_sources(folder, settings)
        templates: dict[str, ChatFormat] = {
            name: ChatTemplate.compile(source, place, special, clock) for name, (source, place) in sources.items()
        }
        written = None if templates else format_of(_read_json(folder / "config.json"))
        if written is not None:
            templates, sources = {"default": written}, {"default": (repr(written), "")}
        parts = [
            tokenizer_bytes,
            json.dumps([special, {n: s for n, (s, _) in sources.items()}], sort_keys=True).encode(),
        ]
        fingerprint = hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).hexdigest()
        return cls(tokenizer, templates, _end_token_ids(folder, tokenizer, special), fingerprint, str(folder))

    def encode(self, text: str) -> list[int]:
        """Ids of the text; a special token's text becomes that token, and none is added. Raises TokenError."""
        try:
            return self._tokenizer.encode(text)
        except (TypeError, UnicodeEncodeError) as error:
            raise TokenError(f"expected Unicode text, got {type(text).__name__}: {error}") from error

    def rendered_text(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, control tokens marked if the chat format tells them from their names in a message.

        Ids with the same text here say the same to the model, in tokens that may be others. Raises as `decode` does.
        """
        if not self._marks_controls:
            return self.decode(token_ids)
        decode, is_control = self._tokenizer.decode, self._tokenizer.control_ids.__contains__
        runs = groupby(self._checked_ids(token_ids, "token ids"), is_control)
        return "".join(
            "".join(control(decode([i])) for i in ids) if named else decode(list(ids)) for named, ids in runs
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, special tokens included. Raises TokenError for what is no id of the vocabulary."""
        return self._tokenizer.decode(self._checked_ids(token_ids, "token ids"))

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool] | None = None, switches: Switches | None = None
    ) -> Prompt:
        """The conversation as a prompt for the next assistant turn.

        messages: OpenAI-style dicts (role, content, reasoning_content, tool_calls, tool_call_id, name).
        tools: JSON schemas of functions. switches: template variables such as `enable_thinking`, or a format's.
        Raises TemplateError for a missing template, invalid messages, and whatever the template raises.
        """
        template = self._template(tools)
        text = template.render(messages, tools, switches, add_generation_prompt=True)
        token_ids = tuple(self._rendered_ids(text))
        history = self._rendered_ids(template.render(messages, tools, switches, add_generation_prompt=False))
        start = self._message_start(token_ids, messages, tools, switches)
        shown = unmarked(text) if self._marks_controls else text
        return Prompt(token_ids, common_prefix(token_ids, history), shown, start)

    def response_ids(
        self,
        messages: Sequence[Message],
        response: Message,
        tools: Sequence[Tool] | None = None,
        switches: Switches | None = None,
    ) -> list[int]:
        """The response as the model would have sampled it: after the generation prompt, before the end token.

        The text is what the template prints for the response when it comes last, encoded on its own, since a model
        starts on a fresh token. Reasoning that the template does not print is put back where the generation prompt has
        opened the thinking; elsewhere its form is unknown and it stays out. Raises TemplateError, also for a response
        that is no assistant's message.
        """
        check_response(response)
        template = self._template(tools)
        history = template.render(messages, tools, switches, add_generation_prompt=False)
        prompt = template.render(messages, tools, switches, add_generation_prompt=True)
        whole = template.render([*messages, response], tools, switches, add_generation_prompt=False)
        # Nearly always the history is followed by the generation prompt and then by nothing else.
        opening = prompt[len(history) :] if prompt.startswith(history) else ""
        turn = whole[len(history) :] if whole.startswith(history) else _last_turn(whole, opening)
        text = self._after_opening(turn, opening)
        reasoning = next((response[key] for key in REASONING_KEYS if response.get(key)), "")
        if opening.rstrip().endswith(OPEN_THINKING) and reasoning.strip() not in text:
            text = reasoning + text
        return self._rendered_ids(self._before_end(text))

    def splice(self, prompt: Prompt, remembered: Remembered) -> Prompt:
        """The prompt with the remembered ids in place of a retokenised response, so that the remembered prefix matches.

        Only where the text is the same; otherwise, or where nothing differs, the prompt itself. See `splice_ids`.
        """
        history = prompt.token_ids[: prompt.turn_start]
        spliced = splice_ids(history, remembered, self.rendered_text)
        if spliced == history:
            return prompt
        return replace(
            prompt,
            token_ids=spliced + prompt.token_ids[prompt.turn_start :],
            turn_start=len(spliced),
            message_start=_moved(prompt.message_start, history, spliced),
        )

    def _message_start(
        self,
        token_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        switches: Switches | None,
    ) -> int:
        """What the prompt shares with a conversation that differs from it in the last message.

        The messages before it can't be rendered alone: without a new user's message many templates print the reasoning
        before it. So an assistant's message is put before a user's, unless roles must alternate; then, and for any
        other message, it is the content that differs.
        """
        if len(messages) < 2:
            return 0
        *before, last = messages
        conversations = [[*before, {**last, "content": ""}]]
        if last.get("role") == "user":
            conversations.insert(0, [*before, {"role": "assistant", "content": ""}, last])
        for conversation in conversations:
            try:
                text = self._template(tools).render(conversation, tools, switches, add_generation_prompt=False)
            except TemplateError:
                continue
            return common_prefix(token_ids, self._rendered_ids(text))
        return 0

    def _template(self, tools: Sequence[Tool] | None) -> ChatFormat:
        """Checkpoints with several named templates keep one for tools beside the default."""
        wanted = ("tool_use", "default") if tools is not None else ("default",)
        for name in wanted:
            if name in self._templates:
                return self._templates[name]
        raise TemplateError(
            f"{self._place}: expected a chat template in chat_template.jinja or tokenizer_config.json, "
            f"found {sorted(self._templates) or 'none'}"
        )

    def _after_opening(self, turn: str, opening: str) -> str:
        """The turn without its opening, or what the turn has of it: a generation prompt may say more before it.

        Of a turn that opens in another way, what follows their common tokens.
        """
        for start in range(max(1, len(opening))):
            if turn.startswith(opening[start:]):
                return turn[len(opening) - start :]
        token_ids = self._rendered_ids(turn)
        return self.rendered_text(token_ids[common_prefix(token_ids, self._rendered_ids(opening)) :])

    def _rendered_ids(self, text: str) -> list[int]:
        """Ids of what a format rendered."""
        if not self._marks_controls:
            return self.encode(text)
        ids: list[int] = []
        for piece, is_control in pieces(text):
            ids += [self._control_id(piece)] if is_control else self._tokenizer.encode_ordinary(piece)
        return ids

    def _control_id(self, token: str) -> int:
        token_id = self._tokenizer.token_to_id(token)
        if token_id is None or token_id not in self._tokenizer.control_ids:
            raise TokenError(f"{self._place}: the chat format needs the control token {token!r}, which there is not")
        return token_id

    def _before_end(self, text: str) -> str:
        """The text up to its last end token, when at most white space follows that."""
        place, end = max(((text.rfind(end), end) for end in self._end_texts), default=(-1, ""))
        return text[:place] if place >= 0 and not text[place + len(end) :].strip() else text

    def _checked_ids(self, token_ids: Sequence[int], what: str) -> list[int]:
        try:
            ids = [operator.index(token_id) for token_id in token_ids]
        except TypeError as error:
            raise TokenError(f"{self._place}: {what}: expected integers, got {token_ids!r:.80}") from error
        for position, token_id in enumerate(ids):
            if not 0 <= token_id < self.vocab_size or token_id in self._holes:
                raise TokenError(
                    f"{self._place}: {what}: expected ids of the vocabulary (below {self.vocab_size}), "
                    f"got {token_id} at position {position}"
                )
        return ids


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the longest common prefix."""
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return min(len(a), len(b))


def splice_ids(
    token_ids: Sequence[int], remembered: Remembered, decode: Callable[[Sequence[int]], str]
) -> tuple[int, ...]:
    """`token_ids` beginning with the remembered prompt and response, if that leaves its text as it is.

    With `known` = prompt_ids + response_ids: when some k exists with decode(token_ids[:k]) == decode(known), returns
    known + token_ids[k:], whose text is decode(token_ids). In every other case returns `token_ids` unchanged: there the
    template or the client changed the history, and only recomputing is right.
    """
    ids, known = tuple(map(int, token_ids)), tuple(map(int, (*remembered.prompt_ids, *remembered.response_ids)))
    shared = common_prefix(ids, known)
    if shared == len(known):
        return ids
    start = max(0, shared - CHARACTER_TOKENS)
    end = _end_of_text(ids, start, decode(known[start:]), decode)
    if end is None:
        return ids
    spliced = known + ids[end:]
    return spliced if decode(spliced[start:]) == decode(ids[start:]) else ids


def _moved(boundary: int, ids: tuple[int, ...], spliced: tuple[int, ...]) -> int:
    """Where a boundary of `ids` lies once they are spliced; 0 if it was within what was replaced."""
    if spliced[:boundary] == ids[:boundary]:
        return boundary
    rest = ids[boundary:]
    return len(spliced) - len(rest) if spliced[len(spliced) - len(rest) :] == rest else 0


def _end_of_text(ids: tuple[int, ...], start: int, text: str, decode: Callable[[Sequence[int]], str]) -> int | None:
    """k with decode(ids[start:k]) == text, by bisection on the length; None if there is none."""
    low, high = start, len(ids)
    while low < high:
        middle = (low + high) // 2
        if len(decode(ids[start:middle])) < len(text):
            low = middle + 1
        else:
            high = middle
    # Within a character of several tokens the decoded length does not grow evenly, so look at the neighbours too.
    for end in range(low - CHARACTER_TOKENS, low + CHARACTER_TOKENS + 1):
        if start <= end <= len(ids) and decode(ids[start:end]) == text:
            return end
    return None


def _last_turn(whole: str, opening: str) -> str:
    """The last assistant turn of a rendering that rewrote its history: from the last, longest piece of its opening."""
    for length in range(len(opening), 0, -1):
        place = whole.rfind(opening[:length])
        if place >= 0:
            return whole[place:]
    raise TemplateError("expected the rendered response to follow the rendered history, but the template rewrote both")


def _read_tokenizer(folder: Path, settings: Mapping[str, Any]) -> tuple[TextTokenizer, bytes]:
    """The tokenizer, and what it depends on. A folder with both files has the second for other programs."""
    file, tokens = folder / TOKENIZER_JSON, folder / TIKTOKEN_MODEL
    if file.is_file():
        content = file.read_bytes()
        return JsonTokenizer.from_bytes(content, settings, folder), content
    if tokens.is_file():
        content = tokens.read_bytes()
        names = json.dumps(settings.get("added_tokens_decoder"), sort_keys=True).encode()
        return TiktokenTokenizer.from_bytes(content, settings, folder), content + names
    others = sorted(p.name for p in folder.glob("*") if p.name.startswith(("token", "vocab", "merges")))
    raise TokenError(
        f"{folder}: expected a file {TOKENIZER_JSON} or {TIKTOKEN_MODEL}, found {others or 'no tokenizer files'}"
    )


def _read_json(file: Path) -> dict[str, Any]:
    """The object in an optional file; empty when the file is absent."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenError(f"{file}: expected JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenError(f"{file}: expected a JSON object, got {type(value).__name__}")
    return value


def _special_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and so on: name -> text, for those that are set."""
    merged = {**_read_json(folder / "special_tokens_map.json"), **settings}
    extra = merged.get("extra_special_tokens")
    if isinstance(extra, dict):
        merged |= extra
    found: dict[str, str] = {}
    for name, value in merged.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _template_sources(folder: Path, settings: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """name -> (template, where it is). A file of its own takes precedence over the settings."""
    files = {"default": folder / "chat_template.jinja"}
    files |= {file.stem: file for file in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    sources = {name: (file.read_text(encoding="utf-8"), str(file)) for name, file in files.items() if file.is_file()}
    if sources:
        return sources
    place = f"{folder / TOKENIZER_CONFIG}: chat_template"
    declared = settings.get("chat_template")
    if declared is None:
        return {}
    if isinstance(declared, str):
        return {"default": (declared, place)}
    try:
        return {entry["name"]: (entry["template"], f"{place} {entry['name']}") for entry in declared}
    except (TypeError, KeyError) as error:
        raise TemplateError(f"{place}: expected text or a list of named templates, got {declared!r:.80}") from error


def _end_token_ids(folder: Path, tokenizer: TextTokenizer, special: Mapping[str, str]) -> list[int]:
    """The tokenizer's end token, then those of generation_config.json and config.json."""
    found: list[int] = []
    if "eos_token" in special:
        token_id = tokenizer.token_to_id(special["eos_token"])
        if token_id is None:
            raise TokenError(f"{folder}: end token {special['eos_token']!r} is not in the vocabulary")
        found.append(token_id)
    for name in ("generation_config.json", "config.json"):
        declared = _read_json(folder / name).get("eos_token_id")
        found += declared if isinstance(declared, list) else [] if declared is None else [declared]
    return found

"""Chat templates: Jinja2 in a sandbox, set up as Hugging Face renders them, so that the text is the same byte for byte.

A template comes with a model and is foreign code. It runs in Jinja's immutable sandbox, sees plain JSON data only, and
whatever it raises becomes a TemplateError that names the template and the line.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, ClassVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from jaxhybrid.chat_messages import Message, Switches, Tool, plain_messages, plain_switches, plain_tools
from jaxhybrid.errors import TemplateError


class _RefusalError(jinja2.TemplateError):
    """The template called raise_exception."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training masks; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's declaration)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _SafeNamespace(Namespace):
    """A namespace on which a template cannot plant the special methods that Python calls outside the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        instance, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_attribute(name)
        Namespace.__init__(instance, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no underscored attribute, got {name!r}")


def _raise_exception(message: str) -> None:
    raise _RefusalError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML and sorts keys; models were trained on neither."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Refuses an unsafe attribute at once, where Jinja would print nothing and carry on."""

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise jinja2.exceptions.SecurityError(f"attribute {attribute!r} of {type(obj).__name__}")


def _environment(clock: Callable[[], datetime]) -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: clock().strftime(pattern)
    environment.globals["namespace"] = _SafeNamespace
    environment.globals["dict"] = lambda *args, **kwargs: dict(*args, **kwargs)  # a function offers no type's methods
    return environment


@dataclass(frozen=True)
class ChatTemplate:
    """One compiled template, the place it came from (for messages) and the special tokens it may print."""

    source: str
    place: str
    special_tokens: Mapping[str, str]
    compiled: jinja2.Template
    marks_controls: ClassVar[bool] = False

    @classmethod
    def compile(
        cls, source: str, place: str, special_tokens: Mapping[str, str], clock: Callable[[], datetime] = datetime.now
    ) -> "ChatTemplate":
        """Raises TemplateError, with the line, for a template that is not valid Jinja."""
        try:
            compiled = _environment(clock).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"{place}: line {error.lineno}: not a valid template: {error.message}") from error
        return cls(source, place, special_tokens, compiled)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None = None,
        switches: Switches | None = None,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The conversation as text.

        `switches` are further template variables (`enable_thinking`, `preserve_thinking`, ...) and win over special
        tokens of the same name. Messages go in as the reference passes them; where the template fails on that, tool
        call arguments are tried as objects and as JSON text, and missing content as empty text.

        Raises TemplateError for messages that are not OpenAI-style dicts, and for all that the template raises.
        """
        plain = plain_messages(messages)
        variables = {**self.special_tokens, **plain_switches(switches), "tools": plain_tools(tools)}
        variables["add_generation_prompt"] = add_generation_prompt
        first_error = None
        for variant in _variants(plain):
            try:
                return self.compiled.render(messages=variant, **variables)
            except _RefusalError as error:
                raise TemplateError(f"{self.place}: the template refuses the conversation: {error}") from error
            except jinja2.exceptions.SecurityError as error:
                raise TemplateError(
                    f"{self.place}: {_line(error)}the template tries something unsafe: {error}"
                ) from error
            except Exception as error:  # foreign code: whatever it raises is its failure
                first_error = first_error or error
        assert first_error is not None
        reason = f"{self.place}: {_line(first_error)}{type(first_error).__name__}: {first_error}"
        raise TemplateError(reason + _arguments_note(plain)) from first_error


def _line(error: BaseException) -> str:
    """`line N: ` of the template that raised, from Jinja's rewritten traceback."""
    number, step = None, error.__traceback__
    while step is not None:
        if step.tb_frame.f_code.co_filename == "<template>":
            number = step.tb_lineno
        step = step.tb_next
    return "" if number is None else f"line {number}: "


def _variants(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The messages as given, then in the other forms that templates ask for, without repeats."""
    seen: list[list[dict[str, Any]]] = []
    filled = [message if "content" in message else {**message, "content": ""} for message in messages]
    for variant in (
        messages,
        filled,
        [_with_arguments(message, _as_object) for message in filled],
        [_with_arguments(message, _as_text) for message in filled],
    ):
        if variant not in seen:
            seen.append(variant)
            yield variant


def _with_arguments(message: dict[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_call_with_arguments(call, convert) for call in message["tool_calls"]]}


def _call_with_arguments(call: dict[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call_with_arguments(call["function"], convert)}
    return {**call, "arguments": convert(call["arguments"])} if "arguments" in call else call


def _as_object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _as_text(arguments: Any) -> Any:
    return arguments if isinstance(arguments, str) else _to_json(arguments)


def _arguments_note(messages: list[dict[str, Any]]) -> str:
    """Names the tool calls whose arguments no template could have read as an object."""
    bad = []
    for i, message in enumerate(messages):
        for j, call in enumerate(message.get("tool_calls", [])):
            arguments = (
                call.get("function", call).get("arguments") if isinstance(call.get("function", call), dict) else None
            )
            if isinstance(arguments, str) and isinstance(_as_object(arguments), str):
                bad.append(f"messages[{i}].tool_calls[{j}]")
    return f" (arguments that are not a JSON object: {', '.join(bad)})" if bad else ""

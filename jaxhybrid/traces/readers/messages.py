"""Chat messages of any origin brought to one shape, and a conversation cut into calls."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxhybrid.errors import TraceError
from jaxhybrid.traces.trajectory import Message, MessageCall

# "developer" is what OpenAI's reasoning models call "system"; open models' templates do not know it.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def text_of(content: Any, source: str) -> str:
    """Message content as text: None is empty, and a list of `{"type": "text", "text": ...}` parts is joined.

    Raises TraceError naming the type of any other part.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TraceError(f"{source}: expected content as text, a list of parts or null, got {type(content).__name__}")
    return "".join(_part_text(part, source) for part in content)


def _part_text(part: Any, source: str) -> str:
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = repr(part.get("type")) if isinstance(part, dict) else type(part).__name__
    raise TraceError(f"{source}: expected content parts of type 'text', got {kind}")


def normalise(message: Any, source: str) -> Message:
    """One OpenAI-style message with only the fields that a chat template reads, its content as text.

    Tool-call arguments stay as they were recorded, a JSON string or an object. Raises TraceError for another role,
    part or shape, or for the obsolete `function_call`.
    """
    if not isinstance(message, dict):
        raise TraceError(f"{source}: expected a message object, got {type(message).__name__}")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise TraceError(f"{source}: expected role {', '.join(sorted(_ROLES))}, got {role!r}")
    if message.get("function_call"):
        raise TraceError(f"{source}: expected 'tool_calls', got the obsolete 'function_call'")
    result: Message = {"role": _ROLES[role], "content": text_of(message.get("content"), source)}
    for key in ("reasoning_content", "tool_call_id", "name"):
        if isinstance(message.get(key), str):
            result[key] = message[key]
    tool_calls = message.get("tool_calls")
    if tool_calls:
        if not isinstance(tool_calls, list):
            raise TraceError(f"{source}: expected tool_calls as a list, got {type(tool_calls).__name__}")
        result["tool_calls"] = [_tool_call(call, source) for call in tool_calls]
    return result


def _tool_call(call: Any, source: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise TraceError(f"{source}: expected tool calls with function.name, got {call!r:.80}")
    arguments = {} if function.get("arguments") is None else function["arguments"]
    if not isinstance(arguments, str | dict):
        raise TraceError(f"{source}: expected tool-call arguments as text or object, got {type(arguments).__name__}")
    result = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **result} if isinstance(call.get("id"), str) else result


def cut_into_calls(
    messages: Sequence[Any],
    source: str,
    *,
    branch: str = "main",
    tools: tuple[dict[str, Any], ...] | None = None,
    is_call: Callable[[int], bool] = lambda _: True,
    started: Callable[[int], float | None] = lambda _: None,
) -> list[MessageCall]:
    """One call for each assistant message: what stands before it is the prompt. What follows the last is no prompt.

    `is_call` and `started` are asked by position in `messages`: an assistant message that the model did not write
    here (a demonstration, copied context) is part of the prompt only, and so is a greeting that opens a conversation.
    """
    responses = [i for i, message in enumerate(messages) if i > 0 and _is_assistant(message) and is_call(i)]
    if not responses:
        return []
    clean = [normalise(message, f"{source}: message {i}") for i, message in enumerate(messages[: responses[-1] + 1])]
    return [
        MessageCall(messages=tuple(clean[:i]), response=clean[i], tools=tools, branch=branch, timestamp_s=started(i))
        for i in responses
    ]


def _is_assistant(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"

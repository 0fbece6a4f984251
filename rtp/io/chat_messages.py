"""Chat messages as clients send them -> as templates expect them: one shape for all spellings.

Content as text parts is the same prompt as the string (cases C09): parts are joined by a newline.
Null content, common in assistant turns that only call tools (V14), is empty text.
"""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec

from rtp.io.errors_http import invalid, unsupported

ROLES = {
    "system": "system",
    "developer": "system",  # the newer name; templates know only the older one
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
MAY_BE_EMPTY = {"assistant", "tool"}
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Part type -> the member that holds its text."""

Message = dict[str, Any]  # Any: templates take what JSON holds


def normalise(messages: object) -> list[Message]:
    """What a template gets: role, content (str), and name, tool_calls, tool_call_id where given.

    Raises ApiError (400) naming the message and member at fault.
    """
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "messages must be a non-empty list")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: object, at: str) -> Message:
    if not isinstance(message, dict):
        raise invalid(at, f"{at} must be an object")
    given = message.get("role")
    role = ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise invalid(f"{at}.role", f"{at}.role must be one of {', '.join(ROLES)}")
    out: Message = {"role": role, "content": _content(message.get("content"), role, at)}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = message.get(name)
        if value is not None:
            if not isinstance(value, str):
                raise invalid(f"{at}.{name}", f"{at}.{name} must be a string")
            out[name] = value
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise invalid(f"{at}.tool_calls", f"{at}.tool_calls must be a list")
        out["tool_calls"] = [_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return out


def _content(content: object, role: str, at: str) -> str:
    where = f"{at}.content"
    if isinstance(content, str):
        return content
    if content is None:
        if role in MAY_BE_EMPTY:
            return ""
        raise invalid(where, f"{where} is missing")
    if not isinstance(content, list):
        raise invalid(where, f"{where} must be a string or a list of parts")
    return "\n".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: object, at: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise invalid(at, f"{at} must be an object with a type")
    if kind not in TEXT_PARTS:
        raise unsupported(at, f"Content of type {kind[:100]!r}")
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise invalid(f"{at}.{TEXT_PARTS[kind]}", f"{at}.{TEXT_PARTS[kind]} must be a string")
    return text


def _call(call: object, at: str) -> Message:
    """A past call: templates print `arguments` from an object, the API carries it as JSON text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise invalid(f"{at}.function", f"{at} must be an object with a function")
    if not isinstance(function.get("name"), str):
        raise invalid(f"{at}.function.name", f"{at}.function.name must be a string")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        # A history may hold what a model once wrote, JSON or not; then it is printed as it is.
        with contextlib.suppress(ValueError, RecursionError):
            arguments = msgspec.json.decode(arguments)
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }

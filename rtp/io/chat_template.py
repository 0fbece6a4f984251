"""Chat messages -> prompt text, by the model's own Jinja template, in a sandbox.

The surroundings are those that templates are written for: transformers' apply_chat_template.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rtp.core.errors import TemplateError

MAX_CHARS = 16 << 20
"""Longest rendered prompt."""
MAX_RENDER_S = 5.0
_CUT = "\ue000cut here\ue000"
"""Marks the end of a message to continue; from a private-use area of Unicode."""


class ChatTemplate:
    """One compiled template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """special_tokens: such as {"bos_token": "<s>"}."""
        self._source = source
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        kwargs: Mapping[str, object],
    ) -> str:
        """kwargs: further variables; they cannot replace the ones above.

        continue_final_message: the text ends with the last message's content, its turn left open.
        Raises TemplateError with the template's own words when it refuses the messages, cannot
        render them, or goes over MAX_CHARS or MAX_RENDER_S.
        """
        shown = [dict(message) for message in messages]
        if continue_final_message:
            shown[-1]["content"] = f"{shown[-1].get('content') or ''}{_CUT}"
        text = self._run(
            self._special_tokens
            | dict(kwargs)
            | {"messages": shown, "add_generation_prompt": add_generation_prompt}
        )
        if not continue_final_message:
            return text
        end = text.rfind(_CUT)
        if end < 0:
            raise TemplateError("the template does not show the message that is to be continued")
        return text[:end]

    def _run(self, variables: dict[str, object]) -> str:
        give_up = time.monotonic() + MAX_RENDER_S
        pieces = []
        size = 0
        try:
            for piece in self._template.generate(variables):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_CHARS:
                    raise TemplateError(f"the prompt is longer than {MAX_CHARS} characters")
                if time.monotonic() > give_up:
                    raise TemplateError(f"the prompt took longer than {MAX_RENDER_S:g} s")
        except TemplateError:
            raise
        # A template is foreign code over foreign data: whatever it raises is its refusal.
        except Exception as error:
            raise TemplateError(str(error) or type(error).__name__) from error
        return "".join(pieces)

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        return environment.from_string(self._source)


class GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks what the assistant says; shown as it is."""

    tags = {"generation"}  # noqa: RUF012  # jinja2 wants a plain set here

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it; Jinja's own filter escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)

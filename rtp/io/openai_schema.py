"""Bodies of the OpenAI-compatible routes: fields, types, bounds. (openai_request: the rest.)

`null` means unset and unknown fields are ignored, as clients of every age send both. Types are
strict: an integer is not 1.5, "1" or true. Every refusal is a 400 that names the field, made before
anything is allocated or queued.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

import msgspec
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticCustomError

from rtp.io.errors_http import ApiError, invalid, unsupported

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 256
MAX_BIASES = 1024
SEED_MASK = 2**63 - 1


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _at_most(limit: int) -> BeforeValidator:
    """Bounds a list or object before its items are looked at: pydantic collects the fault of each
    item, which takes seconds for millions of them."""

    def check(value: object) -> object:
        if isinstance(value, list | dict) and len(value) > limit:
            raise PydanticCustomError(
                "too_long", "May have at most {limit} items", {"limit": limit}
            )
        return value

    return BeforeValidator(check)


Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[Stop], _at_most(MAX_STOPS), BeforeValidator(_listed)]
StopIds = Annotated[list[int], _at_most(MAX_STOP_IDS)]
Biases = Annotated[
    dict[str, Annotated[float, Field(ge=-100, le=100)]],
    _at_most(MAX_BIASES),
]
Json = Any  # Any: shape checked by hand where it is used, so that the error can name the part


class Fields(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Generation(Fields):
    """What completions and chat share."""

    model: str | None = None
    """Unset is accepted while only one model is served."""
    max_tokens: int | None = Field(None, ge=0, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=0, lt=2**31)
    min_tokens: int = Field(0, ge=0, lt=2**31)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=MAX_N)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    logit_bias: Biases = Field(default_factory=dict)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Stops = Field(default_factory=list)
    stop_token_ids: StopIds = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=2**31)
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = 0
    cache_salt: str = Field("", max_length=1024)
    timeout_s: float | None = Field(None, gt=0)
    ttft_timeout_s: float | None = Field(None, gt=0)
    chat_id: str | None = None
    prompt_cache_key: str | None = None
    response_format: Json = None

    refused: ClassVar[dict[str, str]] = {
        "guided_json": "Guided decoding",
        "guided_regex": "Guided decoding",
        "guided_choice": "Guided decoding",
        "guided_grammar": "Guided decoding",
        "structured_outputs": "Structured output",
        "use_beam_search": "Beam search",
        "lora_request": "Choosing an adapter",
        "adapter": "Choosing an adapter",
    }
    """Fields with a meaning that is not served: an answer that ignored them would be wrong."""

    def check(self) -> None:
        """What concerns several fields. Raises ApiError."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "stream_options needs stream: true")
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "prompt_logprobs cannot be streamed")
        if self.truncate_prompt_tokens == 0:
            raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens is -1 or at least 1")
        _check_format(self.response_format)

    @property
    def output_tokens(self) -> int | None:
        """max_completion_tokens, or its older name."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionBody(Generation):
    """POST /v1/completions."""

    prompt: Json = Field(...)
    """str, [str], [int] or [[int]]."""
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    suffix: str | None = None
    add_special_tokens: bool = True

    def check(self) -> None:
        super().check()
        if self.suffix:
            raise unsupported("suffix", "suffix")
        if self.best_of is not None:
            if self.best_of < self.n:
                raise invalid("best_of", f"best_of is below n = {self.n}")
            if self.stream and self.best_of > self.n:
                raise invalid("best_of", "best_of above n cannot be streamed")


class ChatBody(Generation):
    """POST /v1/chat/completions. The messages are checked by chat_messages."""

    messages: Json = Field(...)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Json = None
    tool_choice: Json = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Json] = Field(default_factory=dict)

    refused = Generation.refused | {
        "functions": "Function calling",
        "function_call": "Function calling",
        "audio": "Audio output",
    }

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs: true")
        if self.tool_choice not in (None, "none"):
            raise unsupported("tool_choice", "A tool_choice other than none")
        if self.tools and self.tool_choice is None:
            raise unsupported("tools", "Calling tools")
        if self.add_generation_prompt and self.continue_final_message:
            raise invalid(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other",
            )


class TokenizeBody(Fields):
    """POST /tokenize: a prompt, or messages as chat would send them."""

    model: str | None = None
    prompt: str | None = None
    messages: Json = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Json] = Field(default_factory=dict)
    tools: Json = None

    refused: ClassVar[dict[str, str]] = {}

    def check(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("prompt", "Give either prompt or messages")
        if self.tools:
            raise unsupported("tools", "Tokenising tools")


class DetokenizeBody(Fields):
    """POST /detokenize."""

    model: str | None = None
    tokens: Json = Field(...)

    refused: ClassVar[dict[str, str]] = {}

    def check(self) -> None:
        """The ids are checked against the vocabulary."""


Body = TypeVar("Body", CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)


def parse(raw: bytes, kind: type[Body]) -> Body:
    """The body, every field checked. Raises ApiError (400) naming the first field at fault."""
    try:
        data = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise invalid(None, f"The body is not valid JSON: {reason}", "invalid_json") from None
    if not isinstance(data, dict):
        raise invalid(None, "The body must be a JSON object", "invalid_json")
    given = {name: value for name, value in data.items() if value is not None}
    for name, what in kind.refused.items():
        if given.get(name, False) not in (False, "", []):
            raise unsupported(name, what)
    try:
        body = kind.model_validate(given)
    except ValidationError as error:
        raise _first_fault(error) from None
    body.check()
    return body


def _first_fault(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"]).lstrip(".")
    field = str(first["loc"][0])
    # A client's own keys (logit_bias) are not repeated: `param` names fields only.
    return invalid(field if field == "logit_bias" else param, f"{field}: {first['msg']}")


def _check_format(value: object) -> None:
    if value is None:
        return
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise invalid("response_format", "response_format is an object with a type")
    if kind != "text":
        raise unsupported("response_format", f"response_format of type {kind[:100]!r}")

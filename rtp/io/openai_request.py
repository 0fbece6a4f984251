"""A checked body and a model card -> what the frontend core is asked for: one Begin per prompt."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from rtp.core.card import ModelCard
from rtp.core.events import Begin
from rtp.core.hashing import block_hashes, namespace
from rtp.core.types import Hashes, Ids, RequestId, SamplingParams
from rtp.io.errors_http import ApiError, context_exceeded, invalid
from rtp.io.openai_prompts import DEFAULT_COMPLETION_TOKENS, Prompt
from rtp.io.openai_schema import SEED_MASK, ChatBody, CompletionBody, Generation

GREEDY_BELOW = 1e-4
"""Lower temperatures divide logits beyond what float32 can hold apart; greedy is what they mean."""
HASH_INLINE_BYTES = 1 << 17
"""Prompts up to here (32768 tokens, under a millisecond at 16 a block) are hashed on the loop."""
MAX_CHAT_ID = 128


class Caller(msgspec.Struct, frozen=True, gc=False):
    """Who asks, by headers and keys."""

    tenant: str = ""
    chat_id: str = ""
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """What the operator allows and assumes."""

    secret: bytes
    algorithm: str = "xxh3-128"
    default_timeout_s: float = 600.0
    max_timeout_s: float = 3600.0


def hash_algorithm(tenants: Mapping[str, str] | None) -> str:
    """Several tenants do not trust each other: their caches need a collision-resistant hash."""
    return "sha256" if tenants else "xxh3-128"


async def begins(
    reply_id: str,
    body: CompletionBody | ChatBody,
    shared: SamplingParams,
    prompts: list[Prompt],
    card: ModelCard,
    caller: Caller,
    limits: Limits,
) -> list[Begin]:
    """One Begin per prompt; shared: from shared_params(). Raises ApiError if one is too long."""
    sampling = [_for_prompt(shared, body, prompt, card) for prompt in prompts]
    seed = namespace(
        secret=limits.secret,
        revision=card.revision,
        salt=tenant_salt(caller.tenant, body.cache_salt),
        algorithm=limits.algorithm,
    )
    timeout_s = body.timeout_s or caller.timeout_s or limits.default_timeout_s
    return [
        Begin(
            request_id=RequestId(reply_id if len(prompts) == 1 else f"{reply_id}-{i}"),
            model=card.model,
            prompt=prompt.ids,
            hashes=await _hashes(prompt.ids, card.block_size, seed),
            namespace=seed,
            sampling=params,
            n=num_samples(body),
            stop=tuple(body.stop),
            include_stop=body.include_stop_str_in_output,
            skip_special_tokens=body.skip_special_tokens,
            tenant=caller.tenant,
            chat_id=bounded_chat_id(caller.chat_id or body.chat_id or body.prompt_cache_key or ""),
            priority=max(-16, min(16, body.priority)),
            timeout_s=min(timeout_s, limits.max_timeout_s),
            ttft_timeout_s=body.ttft_timeout_s,
        )
        for i, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
    ]


def num_samples(body: CompletionBody | ChatBody) -> int:
    """Choices generated per prompt: best_of may be more than are returned."""
    best_of = body.best_of if isinstance(body, CompletionBody) else None
    return max(body.n, best_of or 1)


def shared_params(body: CompletionBody | ChatBody, card: ModelCard) -> SamplingParams:
    """What all prompts of a request share, checked before one is tokenised. Raises ApiError."""
    logprobs, prompt_logprobs = _logprobs(body)
    greedy = body.temperature < GREEDY_BELOW or body.top_p == 0
    return SamplingParams(
        max_tokens=body.output_tokens or 0,
        min_tokens=body.min_tokens,
        temperature=0.0 if greedy else body.temperature,
        top_p=body.top_p or 1.0,  # 0 keeps the likeliest token only, which is greedy
        top_k=0 if body.top_k >= card.vocab_size else max(body.top_k, 0),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=_biases(body.logit_bias, card),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        ignore_eos=body.ignore_eos,
        stop_token_ids=_stop_ids(body.stop_token_ids, card),
    )


def _for_prompt(
    shared: SamplingParams, body: CompletionBody | ChatBody, prompt: Prompt, card: ModelCard
) -> SamplingParams:
    room = card.max_model_len - prompt.num_tokens
    wanted = body.output_tokens
    if wanted is None:
        # A chat runs to its end of turn, at most to the context's end; never to zero tokens.
        default = DEFAULT_COMPLETION_TOKENS if isinstance(body, CompletionBody) else room
        wanted = max(min(default, room), 1)
    if wanted > room:
        raise _too_long(prompt.num_tokens, wanted, body, card)
    if body.min_tokens > wanted:
        raise invalid("min_tokens", f"min_tokens is above the {wanted} tokens of output allowed")
    # Equal prompts of one request differ unless the caller fixed the seed.
    seed = secrets.randbits(63) if body.seed is None else body.seed & SEED_MASK
    return msgspec.structs.replace(shared, max_tokens=wanted, seed=seed)


def _logprobs(body: CompletionBody | ChatBody) -> tuple[int | None, int | None]:
    """(logprobs, prompt_logprobs) of the sampling: echo scores the prompt, best_of the choices."""
    if isinstance(body, ChatBody):
        return (body.top_logprobs or 0) if body.logprobs else None, body.prompt_logprobs
    logprobs, of_prompt = body.logprobs, body.prompt_logprobs
    if body.echo and logprobs is not None:
        of_prompt = max(of_prompt or 0, logprobs)
    if logprobs is None and num_samples(body) > body.n:
        logprobs = 0
    return logprobs, of_prompt


def _too_long(num_tokens: int, wanted: int, body: Generation, card: ModelCard) -> ApiError:
    limit = card.max_model_len
    if body.output_tokens is None or num_tokens > limit:
        text = f"your prompt has {num_tokens} tokens, which leaves no room for output"
    else:
        text = f"you asked for {num_tokens + wanted} ({num_tokens} of prompt, {wanted} of output)"
    param = "messages" if isinstance(body, ChatBody) else "prompt"
    return context_exceeded(param, limit, text)


def _biases(given: dict[str, float], card: ModelCard) -> dict[int, float]:
    out = {}
    for key, value in given.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10 or int(key) >= card.vocab_size:
            raise invalid("logit_bias", "logit_bias has a key that is not a token id of this model")
        out[int(key)] = value
    return out


def _stop_ids(given: list[int], card: ModelCard) -> tuple[int, ...]:
    if any(not 0 <= token < card.vocab_size for token in given):
        raise invalid("stop_token_ids", "stop_token_ids holds an id outside the vocabulary")
    return tuple(given)


def tenant_salt(tenant: str, cache_salt: str) -> str:
    """Length first, so that no tenant and salt together spell another pair."""
    return f"{len(tenant)}:{tenant}{cache_salt}" if tenant or cache_salt else ""


def bounded_chat_id(given: str) -> str:
    """Bounded, so that the affinity table is; a long one is named by its digest."""
    if len(given) <= MAX_CHAT_ID:
        return given
    return hashlib.blake2b(given.encode(), digest_size=32).hexdigest()


async def _hashes(ids: Ids, block_size: int, seed: bytes) -> Hashes:
    if len(ids) <= HASH_INLINE_BYTES:
        return block_hashes(ids, block_size, seed)
    return await asyncio.to_thread(block_hashes, ids, block_size, seed)

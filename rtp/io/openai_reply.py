"""What one request's outcome looks like to the client: replies and stream chunks of both APIs.

Both are made by the same code from a Chunk: a whole choice is the join of its chunks, so a stream
and its unstreamed twin cannot differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec import UNSET

from rtp.core.commands import Chunk, Deliver
from rtp.core.steps import TokenLogprobs
from rtp.core.types import unpack_ids
from rtp.io import logprobs as lp
from rtp.io.openai_prompts import Prompt, TextCodec
from rtp.io.openai_schema import ChatBody, CompletionBody
from rtp.io.openai_shapes import (
    ChatChoice,
    ChatDelta,
    ChatDeltaChoice,
    Choice,
    CompletionChoice,
    Envelope,
    Message,
    Usage,
)


@dataclass(slots=True)
class Outcome:
    """What one prompt brought so far."""

    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    chunks: dict[int, list[Chunk]] = field(default_factory=dict)
    held: list[Chunk] = field(default_factory=list)

    def pass_on(self, deliver: Deliver, *, after_scores: bool) -> Sequence[Chunk]:
        """The chunks a stream can send now. after_scores: a choice opens with the prompt's scores;
        they come with choice 0, which other choices may overtake."""
        self.prompt_logprobs = self.prompt_logprobs or deliver.prompt_logprobs
        if not after_scores:
            return deliver.chunks
        self.held += deliver.chunks
        if not self.prompt_logprobs:
            return ()
        ready, self.held = self.held, []
        return ready

    def keep(self, deliver: Deliver) -> None:
        """Takes the chunks of a whole reply."""
        self.prompt_logprobs = self.prompt_logprobs or deliver.prompt_logprobs
        for chunk in deliver.chunks:
            self.chunks.setdefault(chunk.choice, []).append(chunk)

    def samples(self, num: int) -> list[Chunk]:
        """The choices, each joined to one chunk; of more than `num` the likeliest per token."""
        joined = [join(self.chunks[choice]) for choice in sorted(self.chunks)]
        if len(joined) > num:
            joined = sorted(joined, key=_mean_logprob, reverse=True)[:num]
        return joined


class Reply(Protocol):
    """Makes the client's view of one request. Stateful: stream chunks come in order."""

    id: str
    n: int

    def opens_with_scores(self, prompt_no: int) -> bool:
        """Whether a choice begins with the prompt's log-probabilities."""
        ...

    def choice(self, prompt_no: int, sample: int, chunk: Chunk, outcome: Outcome) -> Choice:
        """A whole choice; `chunk` joins all of its chunks."""
        ...

    def delta(self, prompt_no: int, chunk: Chunk, outcome: Outcome) -> Choice:
        """The same for one chunk of a stream."""
        ...

    def envelope(self, choices: Sequence[Choice], usage: Usage | None, *, whole: bool) -> bytes:
        """JSON of a whole reply or of one chunk."""
        ...


class CompletionReply:
    """/v1/completions."""

    def __init__(
        self,
        reply_id: str,
        created: int,
        model: str,
        codec: TextCodec,
        body: CompletionBody,
        prompts: Sequence[Prompt],
    ) -> None:
        self.id = reply_id
        self.n = body.n
        self._head = (reply_id, "text_completion", created, model)
        self._codec = codec
        self._body = body
        self._prompts = prompts
        self._offsets: dict[int, lp.TextOffsets] = {}
        """How far the text of each choice is, by index; absent before its first chunk."""

    def opens_with_scores(self, prompt_no: int) -> bool:
        wanted = self._body.echo and self._body.logprobs is not None
        return wanted and self._prompts[prompt_no].num_tokens > 1

    def choice(self, prompt_no: int, sample: int, chunk: Chunk, outcome: Outcome) -> Choice:
        index = prompt_no * self.n + sample
        made = self._made(prompt_no, index, chunk, outcome)
        wanted = self._body.prompt_logprobs
        if wanted is not None:
            made.prompt_logprobs = lp.for_prompt(self._codec, outcome.prompt_logprobs, wanted)
        return made

    def delta(self, prompt_no: int, chunk: Chunk, outcome: Outcome) -> Choice:
        return self._made(prompt_no, prompt_no * self.n + chunk.choice, chunk, outcome)

    def envelope(self, choices: Sequence[Choice], usage: Usage | None, *, whole: bool) -> bytes:
        del whole  # one shape for both
        return msgspec.json.encode(
            Envelope(*self._head, choices, UNSET if usage is None else usage)
        )

    def _made(self, prompt_no: int, index: int, chunk: Chunk, outcome: Outcome) -> CompletionChoice:
        body, text = self._body, chunk.text
        arrays = None if body.logprobs is None else lp.CompletionLogprobs()
        offsets = self._offsets.get(index)
        if offsets is None:
            echoed = ""
            if body.echo:
                prompt = self._prompts[prompt_no]
                echoed = self._echo(prompt)
                text = echoed + text
                if arrays is not None:
                    self._score_prompt(arrays, prompt, outcome, len(echoed))
            offsets = self._offsets[index] = lp.TextOffsets(self._codec, len(echoed))
        if arrays is not None:
            lp.append(
                arrays,
                self._codec,
                chunk.logprobs,
                body.logprobs or 0,
                offsets,
                skip_special=body.skip_special_tokens,
            )
        return CompletionChoice(index, text, arrays, chunk.finish or None, chunk.stop_reason)

    def _echo(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        return self._codec.decode(unpack_ids(prompt.ids), self._body.skip_special_tokens)

    def _score_prompt(
        self, arrays: lp.CompletionLogprobs, prompt: Prompt, outcome: Outcome, length: int
    ) -> None:
        # A BOS put before the caller's text is not part of it; what the text itself names is.
        skip = self._body.skip_special_tokens or prompt.text is not None
        first = unpack_ids(prompt.ids[:4])[0]
        offsets = lp.TextOffsets(self._codec)
        lp.append_unscored(arrays, self._codec, first, offsets, skip_special=skip)
        lp.append(
            arrays,
            self._codec,
            outcome.prompt_logprobs,
            self._body.logprobs or 0,
            offsets,
            skip_special=skip and prompt.text is None,
        )
        arrays.text_offset[:] = [min(offset, length) for offset in arrays.text_offset]


class ChatReply:
    """/v1/chat/completions."""

    def __init__(
        self, reply_id: str, created: int, model: str, codec: TextCodec, body: ChatBody
    ) -> None:
        self.id = reply_id
        self.n = body.n
        self._head = (reply_id, created, model)
        self._codec = codec
        self._body = body
        self._begun: set[int] = set()

    def opens_with_scores(self, prompt_no: int) -> bool:
        return False

    def choice(self, prompt_no: int, sample: int, chunk: Chunk, outcome: Outcome) -> Choice:
        made = ChatChoice(
            sample,
            Message("assistant", chunk.text),
            self._logprobs(chunk),
            chunk.finish or None,
            chunk.stop_reason,
        )
        wanted = self._body.prompt_logprobs
        if wanted is not None:
            made.prompt_logprobs = lp.for_prompt(self._codec, outcome.prompt_logprobs, wanted)
        return made

    def delta(self, prompt_no: int, chunk: Chunk, outcome: Outcome) -> Choice:
        delta = ChatDelta()
        if chunk.choice not in self._begun:
            self._begun.add(chunk.choice)
            delta.role = "assistant"
            delta.content = chunk.text
        elif chunk.text:
            delta.content = chunk.text
        return ChatDeltaChoice(
            chunk.choice, delta, self._logprobs(chunk), chunk.finish or None, chunk.stop_reason
        )

    def envelope(self, choices: Sequence[Choice], usage: Usage | None, *, whole: bool) -> bytes:
        reply_id, created, model = self._head
        kind = "chat.completion" if whole else "chat.completion.chunk"
        extra = UNSET if usage is None else usage
        return msgspec.json.encode(Envelope(reply_id, kind, created, model, choices, extra))

    def _logprobs(self, chunk: Chunk) -> lp.ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return lp.for_chat(self._codec, chunk.logprobs, self._body.top_logprobs or 0)


def join(chunks: Sequence[Chunk]) -> Chunk:
    """All chunks of one choice as one."""
    if len(chunks) == 1:
        return chunks[0]
    return Chunk(
        choice=chunks[0].choice,
        text="".join(chunk.text for chunk in chunks),
        ids=tuple(token for chunk in chunks for token in chunk.ids),
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
        finish=chunks[-1].finish,
        stop_reason=chunks[-1].stop_reason,
    )


def _mean_logprob(chunk: Chunk) -> float:
    values = [lp.finite(entry.logprob) for entry in chunk.logprobs]
    return sum(values) / len(values) if values else lp.FLOOR

"""What a request must get from the simulated Runner, from its prompt alone."""

from __future__ import annotations

from dataclasses import dataclass

from rtp.backends.sim import Rule, expected_tokens
from rtp.core.events import Begin
from rtp.core.types import unpack_ids

FIRST_CHARACTER = 0x4E00


class Signs:
    """A Detokenizer under which every token is one character of its own."""

    def push(self, token: int) -> str:
        return chr(FIRST_CHARACTER + token)

    def flush(self) -> str:
        return ""


@dataclass(frozen=True, slots=True)
class Expected:
    """One choice, complete."""

    ids: tuple[int, ...]
    text: str
    finish: str
    stop_reason: int | str | None


def expected_choices(begin: Begin, rule: Rule) -> list[Expected]:
    """Every choice of the request, as if it had been alone, on one worker, without a cache."""
    prompt = unpack_ids(begin.prompt)
    return [
        _cut(begin, expected_tokens(rule, prompt, begin.sampling, choice), rule)
        for choice in range(begin.n)
    ]


def _cut(begin: Begin, ids: list[int], rule: Rule) -> Expected:
    """Ends the choice at its first stop string, if that comes before its own end."""
    sampling = begin.sampling
    stop_ids = sampling.stop_token_ids + (() if sampling.ignore_eos else rule.eos_ids)
    stopped = bool(ids) and ids[-1] in stop_ids
    silent = stopped and not begin.include_stop
    text = "".join(chr(FIRST_CHARACTER + token) for token in ids)
    shown = text[:-1] if silent else text
    for end in range(max(1, sampling.min_tokens), len(shown) + 1):
        found = [stop for stop in begin.stop if shown[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            cut = end if begin.include_stop else end - len(stop)
            return Expected(tuple(ids[:end]), shown[:cut], "stop", stop)
    reason = ids[-1] if stopped and ids[-1] in sampling.stop_token_ids else None
    return Expected(tuple(ids), shown, "stop" if stopped else "length", reason)

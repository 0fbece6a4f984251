"""Stored greedy references (transformers, fp32) and the rule by which answers are compared."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer

DATA = Path(__file__).resolve().parent.parent / "backends" / "data" / "greedy_references.json"
NEAR_TIE = 1e-3
"""Two engines may part where the best two logits are this close; shown when it happens."""


@dataclass(frozen=True)
class Stored:
    """One prompt and its greedy continuation."""

    prompt: list[int]
    output: list[int]
    gaps: list[float]
    """Difference of the best two logits at each output."""
    text: str


@cache
def stored() -> list[Stored]:
    """All 20, in the order of the file."""
    from rtp.backends.weights.fetch import resolve
    from rtp.backends.weights.formats import open_checkpoint

    files = open_checkpoint(resolve("smollm2-135m")).tokenizer
    tokenizer = Tokenizer.from_str(files.tokenizer_json)
    rows = json.loads(DATA.read_text())["references"]
    return [
        Stored(r["prompt"], r["output"], r["gaps"], tokenizer.decode(r["output"])) for r in rows
    ]


def parted(references: Sequence[Stored], texts: Sequence[str]) -> list[str]:
    """Texts that differ from their reference, each described; printed near-ties are among them."""
    return [
        f"prompt {i}: {text!r} for {reference.text!r}, smallest gap {min(reference.gaps):.2g}"
        for i, (reference, text) in enumerate(zip(references, texts, strict=True))
        if text != reference.text
    ]

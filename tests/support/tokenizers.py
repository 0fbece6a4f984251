"""Small tokenizers with chat tokens, trained in the test process, and model cards around them."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from rtp.core.card import ModelCard

BOS, START, END = "<|bos|>", "<|im_start|>", "<|im_end|>"
SPECIALS = [BOS, START, END]
"""Ids 0, 1 and 2."""
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog, and the dog does not mind at all",
    "user and assistant talk: What is the capital of France? It is Paris.",
    "def add(first, second):\n    return first + second\n\n",
    "ďábelské ódy, größer, 漢字かな交じり文 🙂🙃 naïve café",
]


@cache
def byte_level_json() -> str:
    """A byte-level BPE, as most current models have."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False)])
    text: str = tokenizer.to_str()
    return text


@cache
def sentencepiece_json() -> str:
    """A BPE with byte fallback in the manner of SentencePiece: the first word gets a space."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[*SPECIALS, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS[:3], trainer)
    spec = json.loads(tokenizer.to_str())
    # The trainer puts what it must not split among the added tokens; bytes are ordinary ones.
    spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] in SPECIALS]
    return json.dumps(spec)


def a_card(tokenizer_json: str | None = None, **fields: object) -> ModelCard:
    """A ChatML model that adds no BOS."""
    base: dict[str, object] = {
        "model": "m",
        "revision": "r",
        "tokenizer_json": tokenizer_json or byte_level_json(),
        "chat_template": CHATML,
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": None,
        "eos_ids": (2,),
        "add_bos": False,
        "vocab_size": 512,
        "max_model_len": 2048,
        "block_size": 16,
        "created": 0,
    }
    return ModelCard(**(base | fields))  # type: ignore[arg-type]

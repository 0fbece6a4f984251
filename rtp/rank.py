"""The process of one rank, `python -m rtp.rank FD PARENT`: started by a worker, runs the model."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rtp.core import plugins
from rtp.core.card import ModelCard
from rtp.core.ports import Capacity, Runner
from rtp.io.runner_process import RunnerSpec, serve

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def load(spec: RunnerSpec, progress: Callable[[str], None]) -> tuple[Runner, ModelCard]:
    """The Runner of a spec and its model's card.

    A backend that reads checkpoints has a parameter `checkpoint`: the model's name or path is
    resolved, downloading it if need be, and the card is made from its files. Any other backend
    (sim) has tokens without a text of their own, gets a byte tokenizer, and never the name of a
    real model that nobody gave it.
    """
    params = dict(spec.params)
    if not _reads_checkpoints(spec.backend):
        progress(f"building {spec.backend}")
        runner: Any = plugins.build("backend", spec.backend, **params)
        name = spec.served_name or spec.backend.rpartition(".")[2]
        return runner, byte_card(name, runner.capacity)
    from rtp.backends.weights.fetch import resolve
    from rtp.backends.weights.formats import open_checkpoint

    path = resolve(spec.model, progress=progress)
    progress(f"loading {path.name}")
    runner = plugins.build("backend", spec.backend, checkpoint=path, **params)
    text = open_checkpoint(path).tokenizer
    capacity: Capacity = runner.capacity
    card = ModelCard(
        model=spec.served_name or model_name(spec.model),
        revision=capacity.revision,
        tokenizer_json=text.tokenizer_json,
        chat_template=text.chat_template,
        bos_token=text.bos_token,
        eos_token=text.eos_token,
        pad_token=text.pad_token,
        eos_ids=text.eos_ids,
        add_bos=text.add_bos,
        vocab_size=capacity.vocab_size,
        max_model_len=capacity.max_model_len,
        block_size=capacity.block_size,
        created=int(path.stat().st_mtime),
    )
    return runner, card


def model_name(model: str) -> str:
    """What a model is called when nobody says: its name, or the last part of its path."""
    return model.rstrip("/").rpartition("/")[2].removesuffix(".gguf")


def byte_card(name: str, capacity: Capacity) -> ModelCard:
    """A card for a Runner without a model: every UTF-8 byte is a token, other ids have made-up
    words, so text goes in and out and every id of the vocabulary has a text."""
    special = {"<unk>": 0, "<s>": 1, "</s>": 2}
    byte_words = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = special | {word: 3 + i for i, word in enumerate(byte_words)}
    vocab |= {f"\u0120t{i}": i for i in range(len(vocab), capacity.vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return ModelCard(
        model=name,
        revision=f"{capacity.kv_format}-{capacity.vocab_size}",
        tokenizer_json=tokenizer.to_str(),
        chat_template=CHAT_TEMPLATE,
        bos_token="<s>",
        eos_token="</s>",
        pad_token=None,
        eos_ids=capacity.eos_ids,
        add_bos=False,
        vocab_size=capacity.vocab_size,
        max_model_len=capacity.max_model_len,
        block_size=capacity.block_size,
        created=0,
    )


def _reads_checkpoints(backend: str) -> bool:
    return "checkpoint" in inspect.signature(plugins.module("backend", backend).build).parameters


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), load)

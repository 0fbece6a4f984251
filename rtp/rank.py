"""The process of one rank, `python -m rtp.rank FD PARENT`: started by a worker, runs the model."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

from rtp.core import plugins
from rtp.core.card import ModelCard
from rtp.core.ports import Capacity, Runner
from rtp.io.runner_process import RunnerSpec, serve


def load(spec: RunnerSpec, progress: Callable[[str], None]) -> tuple[Runner, ModelCard]:
    """The Runner of a spec and its model's card.

    A backend that reads checkpoints has a parameter `checkpoint`: the model's name or path is
    resolved, downloading it if need be, and the card is made from its files. Another backend's
    Runner brings its own card.
    """
    params = dict(spec.params)
    if not _reads_checkpoints(spec.backend):
        progress(f"building {spec.backend}")
        runner: Any = plugins.build("backend", spec.backend, **params)
        return runner, runner.card
    from rtp.backends.weights.fetch import resolve
    from rtp.backends.weights.formats import open_checkpoint

    path = resolve(spec.model, progress=progress)
    progress(f"loading {path.name}")
    runner = plugins.build("backend", spec.backend, checkpoint=path, **params)
    checkpoint = open_checkpoint(path)
    text = checkpoint.tokenizer
    capacity: Capacity = runner.capacity
    card = ModelCard(
        model=spec.served_name,
        revision=checkpoint.revision,
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


def _reads_checkpoints(backend: str) -> bool:
    return "checkpoint" in inspect.signature(plugins.module("backend", backend).build).parameters


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]), load)

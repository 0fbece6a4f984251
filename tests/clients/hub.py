"""Tokenizers as a Hugging Face hub cache, which is how the load tools find one offline."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from rtp.backends.weights.fetch import resolve
from rtp.backends.weights.formats import open_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def of_model(home: Path, model: str) -> Path:
    """Writes a known model's tokenizer under the name local/tok; returns home, for $HF_HOME."""
    files = open_checkpoint(resolve(model)).tokenizer
    config = {
        "bos_token": files.bos_token,
        "eos_token": files.eos_token,
        "pad_token": files.pad_token or files.eos_token,
        "chat_template": files.chat_template,
    }
    return write(home, files.tokenizer_json, config)


def write(home: Path, tokenizer_json: str, config: dict[str, Any]) -> Path:
    """The same of any tokenizer."""
    folder = home / "hub" / "models--local--tok"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    (snapshot / "tokenizer.json").write_text(tokenizer_json)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (snapshot / "tokenizer_config.json").write_text(json.dumps(config))
    return home


def run(command: list[str], home: Path) -> str:
    """A tool to its end, offline. Fails the test with its output where it fails."""
    env = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout

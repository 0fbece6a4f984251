"""Generates the samples of this folder: python -m traces.generate [NAME ...]

Each is drawn from the published statistics of the traces whose form it has and from nothing else
(README.md names them). The same seed gives the same file.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from traces import azure, bailian, burstgpt, conversation, servegen, text, weka

FOLDER = Path(__file__).parent
SAMPLES: dict[str, Callable[[Path], None]] = {
    "sample_conversation.jsonl.gz": conversation.write,
    "sample_bailian.jsonl.gz": bailian.write,
    "sample_azure.csv": azure.write,
    "sample_burstgpt.csv": burstgpt.write,
    "sample_weka.jsonl.gz": weka.write,
    "sample_servegen.tar.gz": servegen.write,
    "sample_text.jsonl": text.write,
}
"""File name -> what writes it."""


def main(names: list[str]) -> None:
    for name in names or SAMPLES:
        SAMPLES[name](FOLDER / name)


if __name__ == "__main__":
    main(sys.argv[1:])

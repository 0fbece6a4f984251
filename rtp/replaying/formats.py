"""`python -m rtp.replay formats`: which traces can be read, and the options of each."""

from __future__ import annotations

from rtp.config import Settings
from rtp.io.traces import FORMATS, options_of


class Config(Settings):
    """`python -m rtp.replay formats`: Lists the formats of traces and their options."""


def main(config: Config) -> int:
    print("\n\n".join(_text(name) for name in FORMATS))
    return 0


def _text(name: str) -> str:
    lines = [f"{name}: {(FORMATS[name].__doc__ or '').strip()}"]
    lines += [f"  --set reader.{option}=...  {what}" for option, what in options_of(name).items()]
    return "\n".join(lines)

"""Mistral: Llama whose layers may see a sliding window only."""

from __future__ import annotations

from rtp.backends.models.spec import Config, ModelSpec, read_spec, read_windows


def spec(config: Config) -> ModelSpec:
    return read_spec(config, windows=read_windows(config, windowed=True))

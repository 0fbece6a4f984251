"""The command line that does again what a config says, whatever file or variable it came from."""

from __future__ import annotations

import shlex

import msgspec

from rtp.config import Settings

NOT_SAID = frozenset({"jobs"})
"""Changes nothing of a result."""


def command(name: str, config: Settings) -> str:
    """With every setting that was given."""
    words = ["python", "-m", "rtp.replay", name]
    for field, value in config.model_dump(mode="json").items():
        if field in NOT_SAID or field not in config.model_fields_set:
            continue
        if isinstance(value, dict):
            words += ["--set", f"{field}={msgspec.json.encode(value).decode()}"]
            continue
        if isinstance(value, list):
            value = ",".join(map(str, value))
        if isinstance(value, bool):
            value = "true" if value else "false"
        words.append(f"--{field.replace('_', '-')}={value}")
    return shlex.join(words)

"""Profiles of hardware as files: measured coefficients, or a data sheet that they follow from.

A file is JSON: `name`, `source` and either the fields of core/cost.Profile or `shape` and
`machine`, of which core/cost.roofline makes one. Those in this folder are known by name.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import msgspec

from rtp.core.cost import Machine, Profile, Shape, roofline
from rtp.core.errors import ConfigError

SUFFIX = ".json"
LARGEST = 1e6
"""No coefficient is so many seconds."""


class _Sheet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str
    source: str
    shape: Shape
    machine: Machine


def names() -> list[str]:
    """Of the profiles that come with rtp, sorted."""
    files = resources.files(__name__).iterdir()
    return sorted(f.name.removesuffix(SUFFIX) for f in files if f.name.endswith(SUFFIX))


def read(name: str) -> Profile:
    """By name, or a file's path. Raises ConfigError saying what there is, or what is wrong."""
    if name in names():
        data = resources.files(__name__).joinpath(name + SUFFIX).read_bytes()
    else:
        path = Path(name)
        if not path.is_file():
            raise ConfigError(
                f"no profile named {name!r} and no such file; there are: {', '.join(names())}"
            )
        data = path.read_bytes()
    try:
        profile = _decoded(data)
    except msgspec.DecodeError as error:
        raise ConfigError(f"profile {name}: {error}") from None
    if not all(0 <= x < LARGEST for x in profile.cost.coefficients):
        raise ConfigError(f"profile {name}: coefficients are seconds from 0 up")
    return profile


def write(path: Path, profile: Profile) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")


def _decoded(data: bytes) -> Profile:
    if b'"machine"' in data:
        sheet = msgspec.json.decode(data, type=_Sheet)
        return roofline(sheet.name, sheet.shape, sheet.machine, sheet.source)
    return msgspec.json.decode(data, type=Profile)

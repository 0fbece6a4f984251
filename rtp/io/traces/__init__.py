"""Request traces as files: rows read, whatever is wrong with one told by its line.

A format is a module here with `fits(head)`, which looks at the beginning of a file, and
`read(path, **options)`. Nothing is dropped without a word: a line is a row, blank, or bad with its
reason.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from rtp.core.errors import ConfigError
from rtp.io.traces import azure, bailian, burstgpt, mooncake, native, servegen, text, weka
from rtp.io.traces.files import look
from rtp.io.traces.mooncake import MOONCAKE_BLOCK, write_mooncake
from rtp.io.traces.rows import BadRow, Trace

__all__ = [
    "FORMATS",
    "MOONCAKE_BLOCK",
    "BadRow",
    "Trace",
    "find_format",
    "options_of",
    "read",
    "write_mooncake",
]

# Any: modules, each with fits() and read().
FORMATS: dict[str, Any] = {
    "rtp": native,
    "bailian": bailian,
    "mooncake": mooncake,
    "weka": weka,
    "text": text,
    "azure": azure,
    "burstgpt": burstgpt,
    "servegen": servegen,
}
"""By name; the first that fits a file's beginning is taken for its format."""


# Any: each format has options of its own.
def read(path: Path, format: str | None = None, **options: Any) -> Trace:
    """The whole trace. format: found by looking at the file where None.

    Raises OSError, and ConfigError for an unknown format or option, a value that an option cannot
    take, or a file that is not of that format at all.
    """
    name = format or find_format(path)
    if name not in FORMATS:
        raise ConfigError(f"no trace format {name!r}; there are {', '.join(FORMATS)}")
    trace: Trace = FORMATS[name].read(path, **_checked(name, options))
    return trace


def find_format(path: Path) -> str:
    """The format a file looks like. Raises ConfigError where it looks like none."""
    head = look(path)
    for name, module in FORMATS.items():
        if module.fits(head):
            return name
    raise ConfigError(
        f"{path}: not a trace of a known format ({', '.join(FORMATS)}); --format names it"
    )


def options_of(format: str) -> dict[str, str]:
    """What `read` takes for it: name -> what it is, its default."""
    return {
        name: f"{_meta(hint).description} Default: {default!r}."
        for name, (hint, default) in _options(format).items()
    }


def _checked(format: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options as their types. Raises ConfigError."""
    known, out = _options(format), {}
    for name, value in options.items():
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise ConfigError(f"trace format {format} has no option {name!r}; {has}")
        try:
            out[name] = msgspec.convert(value, known[name][0], strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{name} of trace format {format}: {error}") from None
    return out


def _options(format: str) -> dict[str, tuple[Any, Any]]:
    """Name -> annotated type, default."""
    reader = FORMATS[format].read
    hints = get_type_hints(reader, include_extras=True)
    parameters = inspect.signature(reader).parameters.values()
    return {p.name: (hints[p.name], p.default) for p in parameters if p.kind is p.KEYWORD_ONLY}


def _meta(hint: Any) -> Any:
    return hint.__metadata__[0]

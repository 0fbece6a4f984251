"""Names -> modules -> build(). Listing imports nothing; a name outside the tree is a dotted path.

A plugin is a module with `build(**params)`, and may have `check() -> list[str]`, the reasons why it
cannot run here (empty: it can). The file name is the name in the config. Other packages add plugins
by dotted path or by an entry point in the group `rtp.<kind>`."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, get_type_hints

import msgspec

from rtp.core.errors import ConfigError

PACKAGES = {
    "backend": "rtp.backends",
    "transport": "rtp.backends.transport",
    "routing": "rtp.policies.routing",
    "ordering": "rtp.policies.ordering",
    "eviction": "rtp.policies.eviction",
    "speculation": "rtp.policies.speculation",
}


def names(kind: str) -> list[str]:
    """Plugins of a kind, built in and installed, sorted. Imports the package, none of its
    members."""
    package = importlib.import_module(PACKAGES[kind])
    inside = {m.name for m in pkgutil.iter_modules(package.__path__) if not m.ispkg}
    outside = {e.name for e in entry_points(group=f"rtp.{kind}")}
    return sorted(inside | outside)


def module(kind: str, name: str) -> ModuleType:
    """The plugin's module. Raises ConfigError naming the choices, or what keeps Python from reading
    the file."""
    path = name if "." in name else f"{PACKAGES[kind]}.{name}"
    for entry in entry_points(group=f"rtp.{kind}"):
        if entry.name == name:
            name = path = entry.module
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise ConfigError(f"{kind} {name!r} cannot be read: {error}") from error
        where = f" (Python finds no module {error.name!r})" if path == name else ""
        raise ConfigError(
            f"no {kind} named {name!r}{where}; there are: {', '.join(names(kind))}"
        ) from None
    except (ImportError, SyntaxError) as error:
        raise ConfigError(f"{kind} {name!r} cannot be read: {error}") from error


def is_own(kind: str, name: str) -> bool:
    """Whether it is of this tree, not a user's."""
    return module(kind, name).__name__ == f"{PACKAGES[kind]}.{name}"


def check(kind: str, name: str) -> list[str]:
    """Reasons why this choice cannot run here; empty is yes."""
    reasons = getattr(module(kind, name), "check", list)
    found: list[str] = list(reasons())
    return found


def build(kind: str, name: str, **params: Any) -> Any:  # Any: each kind has a protocol of its own
    """Makes the plugin. Raises ConfigError, naming what it takes, when it cannot run here, when a
    parameter is none of its own or not of the type its annotation says, or when a policy refuses
    its values."""
    reasons = check(kind, name)
    if reasons:
        raise ConfigError(f"{kind} {name!r} cannot run here: {'; '.join(reasons)}")
    make = getattr(module(kind, name), "build", None)
    if make is None:
        raise ConfigError(f"{kind} {name!r} has no build(), so it is no plugin")
    try:
        inspect.signature(make).bind(**params)
    except TypeError as error:
        raise ConfigError(f"{kind} {name!r}: {error}; {_accepted(make)}") from None
    hints = _hints(make)
    typed = {key: _typed(kind, name, make, key, value, hints) for key, value in params.items()}
    if kind == "backend":  # one that is built reads files and devices: its errors are not about us
        return make(**typed)
    try:
        return make(**typed)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{kind} {name!r}: {error}; {_accepted(make)}") from error


def _typed(
    kind: str, name: str, make: Any, key: str, value: object, hints: dict[str, Any]
) -> object:
    """The value as its annotation wants it (1 for a float is 1.0). What msgspec does not know is
    left to the plugin."""
    try:
        return msgspec.convert(value, hints.get(key, Any))
    except msgspec.ValidationError:
        wanted = inspect.formatannotation(hints[key])
        raise ConfigError(
            f"{kind} {name!r}: {key} wants {wanted}, not {value!r}; {_accepted(make)}"
        ) from None
    except TypeError:
        return value


def _hints(make: Any) -> dict[str, Any]:
    try:
        return get_type_hints(make)
    except NameError:  # imported for type checkers only
        return {}


def _accepted(make: Any) -> str:
    """The end of a sentence: it takes lam: float = 1.0."""
    accepted = [
        str(parameter).replace("'", "") for parameter in inspect.signature(make).parameters.values()
    ]
    return f"it takes {', '.join(accepted) or 'no parameters'}"

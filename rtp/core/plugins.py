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
from typing import Any

from rtp.core.errors import ConfigError

PACKAGES = {
    "backend": "rtp.backends",
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
    """The plugin's module. Raises ConfigError naming the choices."""
    for entry in entry_points(group=f"rtp.{kind}"):
        if entry.name == name:
            found: ModuleType = entry.load()
            return found
    path = name if "." in name else f"{PACKAGES[kind]}.{name}"
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not path.startswith(error.name):
            raise
        raise ConfigError(
            f"no {kind} named {name!r}; there are: {', '.join(names(kind))}"
        ) from None


def check(kind: str, name: str) -> list[str]:
    """Reasons why this choice cannot run here; empty is yes."""
    reasons = getattr(module(kind, name), "check", list)
    found: list[str] = list(reasons())
    return found


def build(kind: str, name: str, **params: Any) -> Any:  # Any: each kind has a protocol of its own
    """Makes the plugin. Raises ConfigError when it cannot run here or a parameter does not fit."""
    reasons = check(kind, name)
    if reasons:
        raise ConfigError(f"{kind} {name!r} cannot run here: {'; '.join(reasons)}")
    make = module(kind, name).build
    try:
        inspect.signature(make).bind(**params)
    except TypeError as error:
        raise ConfigError(f"{kind} {name!r}: {error}; build{inspect.signature(make)}") from None
    return make(**params)

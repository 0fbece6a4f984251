"""Command line, environment and file -> a settings object (fields: rtp.config)."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from rtp.config import FrontendConfig, LocalConfig, MasterConfig, Settings, WorkerConfig
from rtp.core import plugins
from rtp.core.errors import ConfigError

PREFIX = "RTP_"
OTHER_VARIABLES = frozenset({"RTP_API_KEY", "RTP_ADMIN_KEY", "RTP_CACHE", "RTP_TRACES"})
"""Read elsewhere; no fields."""

S = TypeVar("S", bound=Settings)
Tree = dict[str, Any]  # Any: nested, leaves are strings or TOML values


def from_command_line(kind: type[S], argv: Sequence[str] | None = None) -> S:
    """The settings, or the end of the process: 0 after --help, 2 with one line per mistake."""
    prog = f"python -m rtp.{kind.__name__.removesuffix('Config').lower()}"
    try:
        return load(kind, sys.argv[1:] if argv is None else argv, os.environ, prog)
    except ConfigError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def load(kind: type[S], argv: Sequence[str], environ: Mapping[str, str], prog: str = "rtp") -> S:
    """The settings from all sources. Raises ConfigError with a line per mistake."""
    options = vars(_parser(kind, prog).parse_args(argv))
    tree: Tree = _read_file(options["config"]) if options["config"] else {}
    for path, text in _from_environment(kind, environ):
        _put(tree, path, text)
    for path, field in leaves(kind):
        text = options[".".join(path)]
        if text is not None:
            _put(tree, path, _split(field, text))
    for item in options["set"]:
        name, equals, text = item.partition("=")
        if not equals:
            raise ConfigError(f"--set {item}: want name=value")
        _put(tree, tuple(name.replace("-", "_").split(".")), _literal(text))
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(e) for e in error.errors())) from None


def leaves(
    kind: type[BaseModel], above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Every field that holds a value, with its path."""
    for name, field in kind.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from leaves(inner, (*above, name))
        elif "dict" not in str(inner):
            yield (*above, name), field


def to_flags(settings: Settings, only: Sequence[str]) -> list[str]:
    """Flags that give another process these fields; unset ones are left out."""
    flags, dumped = [], settings.model_dump()
    for name in only:
        value = dumped[name]
        if isinstance(value, dict):
            if value:
                flags += ["--set", f"{name}={msgspec.json.encode(value).decode()}"]
        elif value is not None and value != "":
            flags.append(f"--{name.replace('_', '-')}={value}")
    return flags


def _parser(kind: type[Settings], prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=(kind.__doc__ or "").partition(": ")[2],
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=100),
        allow_abbrev=False,
        epilog=f"Each option is also a key of the file and a variable {PREFIX}NAME.",
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file with these settings."
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="A.B=C", help="Any setting, nested ones too."
    )
    groups: dict[str, Any] = {}  # Any: argparse's group type is private
    for path, field in leaves(kind):
        extra: dict[str, Any] = dict(field.json_schema_extra or {})  # type: ignore[arg-type]
        name = extra.get("group", "other")
        group = groups.get(name) or groups.setdefault(name, parser.add_argument_group(name))
        flag = "--" + ".".join(path).replace("_", "-")
        text = (field.description or "").replace("%", "%%") + _plugin_names(path)
        default = field.get_default(call_default_factory=True)
        if default not in (None, "", ()):
            shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
            text += f" [{shown}]"
        switch: dict[str, Any] = {}
        if field.annotation is bool:
            switch = {"nargs": "?", "const": "true"}
        metavar = extra.get("unit") or _choices(field) or _last_word(path)
        if extra.get("hidden"):
            text = argparse.SUPPRESS
        group.add_argument(flag, dest=".".join(path), help=text, metavar=metavar, **switch)
    return parser


def _choices(field: FieldInfo) -> str:
    """{a,b} of a field with so many values, else ""."""
    kind = field.annotation
    values: Sequence[object] = ()
    if kind is bool:
        values = ("true", "false")
    elif get_origin(kind) is Literal:
        values = get_args(kind)
    elif isinstance(kind, type) and issubclass(kind, Enum):
        values = [member.value for member in kind]
    return "{" + ",".join(map(str, values)) + "}" if values else ""


def _last_word(path: tuple[str, ...]) -> str:
    word = path[-1].rpartition("_")[2].upper()
    return "SECONDS" if word == "S" else word


def _plugin_names(path: tuple[str, ...]) -> str:
    """The choices there are of a field that names a plugin."""
    kind = path[-2] if path[-1] == "name" else path[-1]
    return f" Here: {', '.join(_names(kind))}." if kind in plugins.PACKAGES else ""


@functools.cache
def _names(kind: str) -> list[str]:
    return plugins.names(kind)


def _read_file(path: Path) -> Tree:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: {error}") from None


def _from_environment(
    kind: type[Settings], environ: Mapping[str, str]
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """RTP_PORT is port, RTP_ROUTING__NAME is routing.name. What another entry point reads is passed
    over, what nobody reads is a mistake."""
    known = {_variable(path): (path, field) for path, field in leaves(kind)}
    kinds = (MasterConfig, FrontendConfig, WorkerConfig, LocalConfig)
    anyones = {_variable(path) for other in kinds for path, _ in leaves(other)} | OTHER_VARIABLES
    for name, text in sorted(environ.items()):
        if name in known:
            path, field = known[name]
            yield path, _split(field, text)
        elif name.startswith(PREFIX) and name not in anyones:
            raise ConfigError(f"variable {name} is no setting")


def _variable(path: tuple[str, ...]) -> str:
    return PREFIX + "__".join(path).upper()


def _put(tree: Tree, path: tuple[str, ...], value: object) -> None:
    for name in path[:-1]:
        inner = tree.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{'.'.join(path)}: {name} is not a table")
        tree = inner
    tree[path[-1]] = value


def _split(field: FieldInfo, text: str) -> str | list[str]:
    """A list is written with commas."""
    if "tuple" in str(field.annotation):
        return [part.strip() for part in text.split(",") if part.strip()]
    return text


def _literal(text: str) -> object:
    """A JSON value where it is one, else the text itself."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _explain(error: Any) -> str:  # Any: pydantic's ErrorDetails
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{where} is no setting"
    message = error["msg"].removeprefix("Value error, ")
    return f"{where}={error['input']!r}: {message}" if where else message

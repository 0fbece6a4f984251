"""The report: one page that holds its data and its script, and asks no network for anything."""

from __future__ import annotations

from importlib.resources import files

import msgspec

from rtp.replaying.results import Result

PLACE = "/*DATA*/null"


def page(result: Result) -> str:
    """HTML. What a trace or a policy is called is data, never markup."""
    template = files("rtp.replaying").joinpath("page.html").read_text(encoding="utf-8")
    data = msgspec.json.encode(result).decode().replace("<", "\\u003c")
    return template.replace(PLACE, data, 1)

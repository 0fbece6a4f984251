"""Sockets are tried under both event loops: they take protocols over and count time differently."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

BOTH = {"test_ask_link", "test_driver", "test_link", "test_stream"}


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    factories = {"uvloop": uvloop.new_event_loop}
    if item.path.stem in BOTH:
        factories["asyncio"] = asyncio.new_event_loop
    return factories

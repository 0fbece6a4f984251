"""Which Transport a worker gets, and which roles need one."""

from __future__ import annotations

from math import inf

import pytest

from rtp.backends.transport.sim import SimTransport
from rtp.config import WorkerConfig
from rtp.core.errors import ConfigError
from rtp.settings import load
from rtp.transports import transfer, transport_of


def config(*flags: str) -> WorkerConfig:
    return load(WorkerConfig, flags, {})


def test_a_backend_gets_the_transport_that_moves_its_pages() -> None:
    name, transport = transport_of(
        config("--backend=sim", "--role=decode", "--set", "transport.params.latency_s=0.5")
    )
    assert name == "sim"
    assert transfer(transport) == (0.5, 1.0e6)
    assert transfer(SimTransport(0.1, inf)) == (0.1, 0.0)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_role_that_hands_over_is_refused_without_a_transport(role: str) -> None:
    with pytest.raises(ConfigError, match=rf"role {role} needs a transport .* torch_cpu"):
        transport_of(config("--backend=torch_cpu", f"--role={role}"))


def test_fusion_needs_no_transport() -> None:
    assert transport_of(config("--backend=torch_cpu")) == ("", None)
    assert transfer(None) == (0.0, 0.0)


def test_a_transport_for_other_pages_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"transport sim cannot move .* torch_cpu"):
        transport_of(config("--backend=torch_cpu", "--transport.name=sim"))
    with pytest.raises(ConfigError, match="no transport named 'carrier_pigeon'"):
        transport_of(config("--backend=sim", "--transport.name=carrier_pigeon"))

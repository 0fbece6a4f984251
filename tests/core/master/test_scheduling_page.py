"""The scheduling page names what there is: gates, metrics, numbers."""

from __future__ import annotations

import re
from pathlib import Path

from rtp.config import MasterConfig, Tenant
from rtp.core.master import load, pool, rounds, shares, tenants, window
from rtp.core.master.admission import GATES
from rtp.io.clock import LoopTimes
from rtp.io.metrics_facts import WithAliases
from rtp.policies.routing import predicted_ttft
from tests.io.test_metrics_master import watched
from tests.support.fleet import Fleet

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "scheduling.md").read_text()


def test_every_gate_is_on_the_page():
    assert set(GATES) <= set(re.findall(r"`(\w+)`", PAGE))


def test_every_metric_on_the_page_exists():
    fleet = Fleet()
    fleet.add(ranks=2, lockstep=True)
    metrics = watched(fleet)
    metrics.watch(loop=LoopTimes())
    known = {family.name for family in WithAliases(metrics.registry).collect()}
    named = {name.removesuffix("_total") for name in re.findall(r"\brtp_\w+", PAGE)}
    assert named <= known, named - known


def test_every_setting_of_a_tenant_and_its_default_is_on_the_page():
    assert set(Tenant.model_fields) <= set(re.findall(r"\w+", PAGE))
    defaults = MasterConfig()
    assert f"`--max-queue-requests` {defaults.max_queue_requests}" in PAGE
    assert f"`--max-queue-tokens` {defaults.max_queue_tokens >> 20} Mi" in PAGE


def test_the_numbers_are_those_of_the_code():
    for text in (
        f"max({window.OVERDUE_S:g} s, {window.OVERDUE_SERVICES:g} x service)",
        f"{1000 * pool.LEAST_LEAD_S:g} to {1000 * pool.MOST_LEAD_S:g} ms",
        f"looks at {rounds.MOST_LOOKS} requests at most, {1000 * rounds.NEXT_ROUND_S:g} ms apart",
        f"{rounds.HOLD_MARGIN:g} times the predicted wait",
        f"default: {tenants.BURST_S:g} s of tokens_per_s",
        f"| `lam` | {predicted_ttft.LAM} |",
        f"| `crowd` | {predicted_ttft.CROWD} |",
        f"up to {predicted_ttft.MOST_BACKLOG_S:g} s",
        f"| `excess` | {predicted_ttft.EXCESS} |",
        f"| `delay` | {predicted_ttft.DELAY} |",
    ):
        assert text in PAGE, text
    assert (shares.OVERDUE_EVERY, load.MOST_HELD) == (4, 3)
    assert "every fourth grant" in PAGE
    assert "three at most" in PAGE

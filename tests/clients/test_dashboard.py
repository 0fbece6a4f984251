"""The dashboard in a real browser: drawn without a console error, for one worker, many and none."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.browser import BROWSER, MISSING, drawn
from tests.support.scripted_frontend import an_api, says

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason=MISSING)]


def a_worker(number: int, *, ranks: int = 1, state: str = "ready") -> dict[str, Any]:
    columns = {"running": number % 9, "waiting": number % 3, "prefill_tokens": 100 * (number % 4)}
    kv = {"kv_total": 32768, "kv_free": 32768 - (number * 2111) % 32768, "step_us": 15000}
    return {
        "worker_id": f"worker-{number}",
        "role": "fusion",
        "model": "toy",
        "state": state,
        "address": f"10.0.0.{number}:4000",
        "draining": False,
        "ranks": [{"rank": i, **columns, **kv} for i in range(ranks)],
    }


def a_placement(number: int) -> dict[str, Any]:
    scores = [-0.01 * number, -0.4]
    candidates = [
        {
            "worker_id": f"worker-{i}",
            "rank": 0,
            "chosen": i == 0,
            "score": score,
            "matched_tokens": 160.0,
            "wait_s": 0.012,
            "prefill_s": 0.2,
        }
        for i, score in enumerate(scores)
    ]
    facts = {"number": number, "num_candidates": 2, "fallback": "", "candidates": candidates}
    return {"request_id": f"cmpl-{number}<script>alert(1)</script>", **facts}


def an_overview(*workers: dict[str, Any]) -> dict[str, Any]:
    return {
        "uptime_s": 93784.0,
        "models": {"toy": {}},
        "queue": {"requests": 3, "tokens": 4096, "held": 1},
        "workers": list(workers),
        "departed": [{"worker_id": "old", "state": "lost", "ago_s": 75.0}],
        "refused": {"queue_requests": 12, "deadline": 0},
        "placements": [a_placement(n) for n in range(1, 6)],
    }


async def test_it_shows_workers_placements_and_rates():
    overview = an_overview(a_worker(1), a_worker(2, ranks=4), a_worker(3, state="suspect"))
    async with an_api(says("hello"), overview=lambda: overview) as api:
        for _ in range(3):
            await api.complete()
        page, console = await drawn(api.url + "/dashboard")
    assert console == ""
    assert 'data-drawn="yes"' in page
    assert page.count('class="card worker"') == 3
    assert page.count('class="rank"') == 6
    assert page.count('class="dot ready"') == 2
    assert "ahead of worker-1/0" in page
    assert "Refused by queue requests" in page
    assert "up 1 d 2 h" in page
    assert "2 of 3 workers ready" in page
    titles = " ".join(re.findall('title="([^"]*)"', page))
    for words in ("Time to first token", "Time per output token", "Fusion:", "A held one waits"):
        assert words in titles
    assert "on ranks, without pages, were sent" in titles
    # What a client chose is shown as text, and only the page's own script runs.
    assert "&lt;script&gt;alert" in page
    assert len(re.findall("<script", page)) == 1


@pytest.mark.parametrize("workers", [0, 1, 64])
async def test_it_fits_any_number_of_workers(workers: int):
    overview = an_overview(*(a_worker(n) for n in range(workers)))
    async with an_api(overview=lambda: overview) as api:
        page, console = await drawn(api.url + "/dashboard")
    assert console == ""
    assert page.count('class="card worker"') == workers
    assert ('class="workers many"' in page) == (workers == 64)


async def test_it_tells_when_it_has_no_data():
    def broken() -> dict[str, Any]:
        raise RuntimeError("gone")

    async with an_api(overview=broken) as api:
        page, _ = await drawn(api.url + "/dashboard")
    assert "no data for" in page
    assert "status 500" in page

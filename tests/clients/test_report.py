"""The replay report in a real browser: drawn without a console error, and without a network."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from rtp.replay import main
from tests.support.browser import BROWSER, MISSING, drawn
from tests.support.live import live_cluster
from tests.support.traces import SAMPLE

pytestmark = [pytest.mark.slow, pytest.mark.skipif(BROWSER is None, reason=MISSING)]


async def test_it_is_drawn_offline_from_its_file_alone(tmp_path: Path):
    options = [
        "--trace",
        str(SAMPLE),
        "--rows",
        "120",
        "--out",
        str(tmp_path / "r"),
        "--seeds",
        "2",
    ]
    assert main(["run", *options, "--policy", "predicted_ttft,random@early,rtp_score"]) == 0
    page = (tmp_path / "r.html").read_text()
    assert not re.findall(r"(?:src|href)=[\"'](?!data:)", page)
    # Whatever it asked a network for would fail, and be told on the console.
    dead = ("--proxy-server=127.0.0.1:9", "--host-resolver-rules=MAP * ~NOTFOUND")
    dom, console = await drawn((tmp_path / "r.html").as_uri(), *dead)
    assert console == ""
    assert 'data-drawn="yes"' in dom
    titles = re.findall("<h3[^>]*>([^<]+)", dom)
    assert {"Time to first token", "Time per output token", "End to end"} <= set(titles)
    assert {"Requests waiting in the Master", "TTFT p95 by arrival", "Decoding"} <= set(titles)
    assert dom.count('class="line"') == 3 * len(titles)
    for words in ("Where the time of a request went", "interval of that mean", "random@early"):
        assert words in dom
    assert "python -m rtp.replay run" in dom
    assert not re.search(
        "NaN|undefined|Infinity", dom.partition("</head>")[2].partition("<script")[0]
    )


async def test_a_live_run_draws_what_is_seen_from_outside(tmp_path: Path):
    trace = tmp_path / "t.jsonl"
    row = '{"timestamp":%d,"input_length":600,"output_length":3,"hash_ids":[0,1]}\n'
    trace.write_text("".join(row % (30 * i) for i in range(8)))
    options = ["--trace", str(trace), "--out", str(tmp_path / "r")]
    async with live_cluster(workers=1) as cluster:
        assert await asyncio.to_thread(main, ["run", "--live", cluster.url, *options]) == 0
    dom, console = await drawn((tmp_path / "r.html").as_uri())
    assert console == ""
    assert 'data-drawn="yes"' in dom
    titles = set(re.findall("<h3[^>]*>([^<]+)", dom))
    assert {"Time to first token", "End to end", "Decoding"} <= titles
    assert "Requests waiting in the Master" not in titles
    assert "Grants are not seen from outside" in dom

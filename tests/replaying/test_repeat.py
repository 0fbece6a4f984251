"""The command a result names says what its config says, wherever that came from."""

from __future__ import annotations

import shlex

import pytest

from rtp.replaying.repeat import command
from rtp.replaying.run import Config
from rtp.settings import load

CASES = [
    "--trace t.csv",
    "--trace 'a b.csv' --rows 3 --loop open --set reader.block_size=32 --format azure",
    "--trace t --policy rtp_score,random@early --set params.rtp_score.gamma=0.1 --seeds 3",
    "--trace t --prefill-workers 2 --decode-workers 2 --fault 1:lost:p1,3:slow:d0:2",
    "--trace t --decode false --slo-tpot-s 0.1 --set master.lead_s=0.05 --out r --jobs 3",
    "--trace t --live http://127.0.0.1:1 --speed 0.5 --live-model 'a model'",
]


@pytest.mark.parametrize("words", CASES)
def test_it_reads_as_the_same_config(words: str):
    config = load(Config, shlex.split(words), {"RTP_SEED": "4"})
    told = shlex.split(command("run", config))
    assert told[:4] == ["python", "-m", "rtp.replay", "run"]
    again = load(Config, told[4:], {})
    assert again.model_dump() == config.model_dump() | {"jobs": again.jobs}

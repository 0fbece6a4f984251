"""Profiles of hardware as files."""

from __future__ import annotations

from pathlib import Path

import pytest

from rtp.core.cost import Profile
from rtp.core.errors import ConfigError
from rtp.io import profiles

MOST_S = 0.1


@pytest.mark.parametrize("name", profiles.names())
def test_profiles_that_come_with_rtp_are_sourced_and_plausible(name: str):
    profile = profiles.read(name)
    assert profile.name == name
    assert len(profile.source) > 40
    assert 0 < profile.cost.decode_s(1, 1000) < MOST_S
    assert 0 < profile.cost.prefill_s(1000) < 20 * MOST_S
    assert profile.kv_tokens > 0
    assert profile.transfer_tokens_per_s > 0


def test_a_profile_comes_back_as_it_was_written(tmp_path: Path):
    profile = Profile(name="mine", source="measured", a=1, b=2, c=3, d=4, e=5, f=6, kv_tokens=7)
    profiles.write(tmp_path / "p.json", profile)
    assert profiles.read(str(tmp_path / "p.json")) == profile


def test_an_unknown_name_tells_what_there_is():
    with pytest.raises(ConfigError, match="llama2-70b-8xa100"):
        profiles.read("llama9")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "truncated"),
        ('{"name": "x", "source": "y"}', "`a`"),
        ('{"name": "x", "source": "y", "a": -1, "b": 0, "c": 0, "d": 0, "e": 0, "f": 0}', "from 0"),
        ('{"name": "x", "source": "y", "machine": {}, "shape": {}}', "missing"),
    ],
)
def test_a_bad_file_is_told_by_its_name_and_fault(tmp_path: Path, text: str, reason: str):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=rf"(?s)bad\.json.*{reason}"):
        profiles.read(str(path))

"""A prompt is matched once while nothing changes; arrivals count only what the rank lacks."""

from __future__ import annotations

import pytest

from rtp.core.hashing import low64
from rtp.core.master.matches import MOST_KEPT, Matches
from rtp.core.master.prefix_map import PrefixMap
from rtp.core.types import Tier
from tests.support.fleet import Fleet, hashes_of

PROMPT = hashes_of(range(160))


class Counted(PrefixMap):
    num_matches = 0

    def match(self, keys):
        self.num_matches += 1
        return super().match(keys)


def test_a_match_is_kept_while_the_map_stays_as_it_is():
    prefix_map = Counted(4)
    matches = Matches(prefix_map)
    prefix_map.add(1, PROMPT[:64], Tier.DEVICE)
    assert matches.of(PROMPT).device[1] == 4
    assert matches.of(PROMPT) is matches.of(bytes(bytearray(PROMPT)))
    assert prefix_map.num_matches == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.add(2, PROMPT, Tier.HOST),
        lambda m: m.remove(1, PROMPT[16:], Tier.DEVICE),
        lambda m: m.arrive(3, PROMPT),
        lambda m: m.settle(0, m.arrive(0, PROMPT)),
        lambda m: m.drop_rank(1),
        lambda m: m.clear_rank(1),
    ],
)
def test_whatever_may_change_a_match_makes_it_anew(change):
    prefix_map = Counted(4)
    matches = Matches(prefix_map)
    prefix_map.add(1, PROMPT[:64], Tier.DEVICE)
    matches.of(PROMPT)
    change(prefix_map)
    found = matches.of(PROMPT)
    assert prefix_map.num_matches == 2
    fresh = prefix_map.match(low64(PROMPT))
    assert found.device.tolist() == fresh.device.tolist()
    assert (found.host.tolist(), found.best) == (fresh.host.tolist(), fresh.best)


def test_few_matches_are_kept():
    matches = Matches(PrefixMap(4))
    for i in range(3 * MOST_KEPT):
        matches.of(hashes_of(range(i, i + 16)))
        assert len(matches._known) <= MOST_KEPT


def test_a_request_placed_in_the_turn_it_came_is_matched_once():
    prefix_map = Counted(8)
    fleet = Fleet(max_ranks=8, prefix_map=prefix_map)
    fleet.add()
    assert fleet.grant(fleet.ask(range(160)))
    assert prefix_map.num_matches == 1


def test_of_blocks_that_matched_only_what_still_arrives_is_counted():
    prefix_map = PrefixMap(2)
    keys = list(range(10))
    prefix_map.add(0, keys[:4], Tier.DEVICE)
    first = prefix_map.arrive(0, keys[:8], held=4)
    assert first == keys[4:8]
    second = prefix_map.arrive(0, keys, held=8)  # it matched what the first one will compute
    assert sorted(second) == keys[4:]
    prefix_map.settle(0, first)
    assert prefix_map.match(keys).device[0] == 10  # the second one still computes them
    prefix_map.settle(0, second)
    assert prefix_map.match(keys).device[0] == 4
    assert prefix_map.num_arriving() == 0

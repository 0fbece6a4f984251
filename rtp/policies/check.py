"""`python -m rtp.policies.check NAME`: whether a routing policy keeps what every policy promises.

NAME is a policy's name or the dotted path of a module with build(). The same checks run over all
policies of the tree (tests/conformance); a policy that passes them never makes the Master fall
back on columns like these.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import numpy as np

from rtp.core import plugins
from rtp.core.errors import ConfigError
from rtp.core.master.predictor import RankPredict
from rtp.core.policy import Candidates, Predict, Query, Routing
from rtp.core.types import FloatArray

Make = Callable[[], Routing]
PROFILE = (1e-3, 1e-5, 1e-10, 1e-3, 1e-4, 1e-8)
"""Seconds by the predictor's six terms: 10 us a prompt token."""
SIZES = (1, 2, 7, 2000)
TIMED_CALLS = 200


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 where every check passed, 1 where one did not, 2 for a wrong name."""
    parser = argparse.ArgumentParser(
        prog="python -m rtp.policies.check", description="Checks a routing policy."
    )
    parser.add_argument("name", help="Its name, or the dotted path of its module.")
    parser.add_argument(
        "--set", action="append", default=[], metavar="P=V", help="A parameter of build()."
    )
    options = parser.parse_args(argv)
    params = dict(map(_parameter, options.set))
    make = partial(plugins.build, "routing", options.name, **params)
    try:
        make()
    except ConfigError as error:
        print(f"rtp.policies.check: {error}", file=sys.stderr)
        return 2
    found = {name: check(make) for name, check in CHECKS.items()}
    for name, fault in found.items():
        print(f"{'FAILED' if fault else 'ok':6} {name}{': ' + fault if fault else ''}")
    if any(found.values()):
        return 1
    print(f"{_microseconds(make()):.0f} us a decision among {SIZES[-1]} ranks")
    return 0


def some_candidates(num: int, seed: int = 0) -> Candidates:
    """`num` ranks with columns drawn at random, read-only as the Master's are."""
    rng = np.random.default_rng(seed)

    def tokens(most: int) -> FloatArray:
        return rng.integers(0, most, num).astype(np.float64)

    matched = tokens(60) * 16
    columns = {
        "rank_ids": np.sort(rng.choice(5000, num, replace=False)),
        "matched_tokens": matched,
        "host_tokens": matched + 16,
        "best_tokens": float(matched.max() + 16),
        "wait_s": rng.random(num) * 0.03,
        "prefill_tokens": tokens(3000),
        "num_requests": tokens(50),
        "decode_rows": tokens(40),
        "context_tokens": tokens(40_000),
        "kv_free": tokens(90_000),
        "kv_total": np.full(num, 100_000.0),
        "affine": rng.random(num) < 0.1,
    }
    return _frozen(columns)


def equal_candidates(num: int) -> Candidates:
    """Idle, empty ranks: every column but rank_ids is nought."""
    zeros = np.zeros(num)
    columns: dict[str, object] = dict.fromkeys(Candidates.__dataclass_fields__, zeros)
    columns["rank_ids"] = np.arange(num)
    columns["best_tokens"] = 0.0
    columns["affine"] = np.zeros(num, dtype=np.bool_)
    return _frozen(columns)


def a_query(number: int = 0) -> Query:
    """A prompt of 1,000 tokens."""
    return Query(
        num_tokens=1000,
        max_tokens=100,
        num_blocks=62,
        block_size=16,
        priority=0,
        number=number,
        expected_output=50,
    )


def a_predictor(num: int) -> Predict:
    return RankPredict(np.repeat(np.array(PROFILE)[:, None], num, axis=1))


# ---------------------------------------------------------------- checks: "" or what is wrong


def _scores_are_numbers(make: Make) -> str:
    policy = make()
    for num in SIZES:
        for number in range(5):
            scores = policy.score(a_query(number), some_candidates(num, number), a_predictor(num))
            if wrong := _not_scores(scores, num):
                return wrong
    return ""


def _idle_ranks_are_scored(make: Make) -> str:
    """Nought in every column, so that a division by one shows."""
    with np.errstate(all="ignore"):
        scores = make().score(a_query(), equal_candidates(3), a_predictor(3))
    return _not_scores(scores, 3)


def _columns_are_only_read(make: Make) -> str:
    offered = some_candidates(20)
    names = Candidates.__dataclass_fields__
    before = {name: np.copy(getattr(offered, name)) for name in names}
    try:
        make().score(a_query(), offered, a_predictor(20))
    except ValueError as error:
        if "read-only" in str(error):
            return f"it writes into a column of its candidates ({error})"
        raise
    changed = [
        name for name, old in before.items() if not np.array_equal(getattr(offered, name), old)
    ]
    return f"it changes {', '.join(changed)}" if changed else ""


def _two_of_a_kind_decide_alike(make: Make) -> str:
    """Whatever is random comes from the query's number, so that a replay decides alike."""
    one, two = make(), make()
    for number in range(30):
        offered = some_candidates(9, number)
        query, predict = a_query(number), a_predictor(9)
        if not np.array_equal(
            one.score(query, offered, predict), two.score(query, offered, predict)
        ):
            return f"two of it score decision {number} differently"
    return ""


def _rows_stand_alone_where_it_says_so(make: Make) -> str:
    """With `by_row` it is shown more rows than the candidates."""
    policy = make()
    if not getattr(policy, "by_row", False):
        return ""
    whole, some = some_candidates(50), np.arange(0, 50, 3)
    columns = {name: getattr(whole, name) for name in Candidates.__dataclass_fields__}
    part = _frozen({n: c[some] if isinstance(c, np.ndarray) else c for n, c in columns.items()})
    among_all = policy.score(a_query(), whole, a_predictor(50))[some]
    alone = policy.score(a_query(), part, a_predictor(len(some)))
    return "" if np.array_equal(among_all, alone) else "a row's score depends on other rows"


LOADS = ("wait_s", "prefill_tokens", "num_requests", "decode_rows", "context_tokens")


def _load_is_never_liked_where_it_says_so(make: Make) -> str:
    """With `monotone` ranks that an idle one excels are not shown to it."""
    policy = make()
    if not getattr(policy, "monotone", False):
        return ""
    offered = some_candidates(50)
    columns = {name: getattr(offered, name) for name in Candidates.__dataclass_fields__}
    before = policy.score(a_query(), offered, a_predictor(50))
    for name in LOADS:
        more = _frozen(columns | {name: 1.5 * columns[name] + 1})
        if (policy.score(a_query(), more, a_predictor(50)) > before).any():
            return f"a rank with more {name} scores higher"
    less = _frozen(columns | {"matched_tokens": 0.5 * columns["matched_tokens"]})
    if (policy.score(a_query(), less, a_predictor(50)) > before).any():
        return "a rank with less of the prompt scores higher"
    return ""


def _answers_do_not_share_memory(make: Make) -> str:
    """Scores are the Master's once they are returned."""
    policy = make()
    first = policy.score(a_query(0), some_candidates(9, 0), a_predictor(9))
    kept = np.copy(first)
    policy.score(a_query(1), some_candidates(9, 1), a_predictor(9))
    return "" if np.array_equal(first, kept) else "a later call changes the scores it returned"


def _caught(check: Callable[[Make], str]) -> Callable[[Make], str]:
    def run(make: Make) -> str:
        try:
            return check(make)
        except Exception as error:  # a user's policy may raise anything
            return f"it raises {type(error).__name__}: {error}"

    return run


CHECKS: dict[str, Callable[[Make], str]] = {
    "scores are one finite number per candidate": _caught(_scores_are_numbers),
    "idle and empty ranks are scored": _caught(_idle_ranks_are_scored),
    "columns are only read": _caught(_columns_are_only_read),
    "two of a kind decide alike": _caught(_two_of_a_kind_decide_alike),
    "rows stand alone if by_row says so": _caught(_rows_stand_alone_where_it_says_so),
    "load is never liked if monotone says so": _caught(_load_is_never_liked_where_it_says_so),
    "scores stay as they were returned": _caught(_answers_do_not_share_memory),
}


def _not_scores(scores: object, num: int) -> str:
    if not isinstance(scores, np.ndarray):
        return f"it returns a {type(scores).__name__}, not an array"
    if scores.shape != (num,):
        return f"for {num} candidates it returns the shape {scores.shape}"
    if scores.dtype != np.float64:
        return f"it returns {scores.dtype}, not float64"
    return "" if np.isfinite(scores).all() else "it returns a score that is not finite"


def _frozen(columns: dict[str, object]) -> Candidates:
    for column in columns.values():
        if isinstance(column, np.ndarray):
            column.flags.writeable = False
    return Candidates(**columns)  # type: ignore[arg-type]  # one type per column


def _parameter(text: str) -> tuple[str, object]:
    name, _, value = text.partition("=")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value


def _microseconds(policy: Routing) -> float:
    num = SIZES[-1]
    offered, predict = some_candidates(num), a_predictor(num)
    start = time.perf_counter()
    for number in range(TIMED_CALLS):
        policy.score(a_query(number), offered, predict)
    return 1e6 * (time.perf_counter() - start) / TIMED_CALLS


if __name__ == "__main__":
    sys.exit(main())

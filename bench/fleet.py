"""The Master at the head of 1,250 simulated ranks: grants a second, and how long one takes.

    python -m bench.fleet [--seconds 60] [--rate 5200] [--load 0.6] [--overload 1.15]

A Master (`python -m rtp.master`, pinned to core 0) and, on core 1, one process with the simulated
ranks (bench/lean_fleet.py) and the generator; real sockets between them. Load: the Mooncake
conversation trace (bench/conversation.py), open loop, over the frontend protocol. Latency counts
from the intended arrival to the arrival of the Grant. Service times are scaled so that the prefill
ranks are busy for the share that --load says. Requests that the Master held on purpose, for a busy
rank with their prefix, are told apart. What it does not show: real engines, several frontends, a
network.

The reference, a Master on 20 cores in production (arXiv 2605.29639): 5.2k requests/s at P50 11,
P95 263 and P99 858 ms."""

from __future__ import annotations

import argparse
import sys
import tempfile
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.conversation import Conversation, find_trace
from bench.fleet_run import LATE_MS, Plan, Run, measure
from bench.load import percentiles
from bench.master_process import Observer
from bench.profiled_master import report
from bench.report import Claim, finish, machine

BLOCKS_PER_RANK = 1024
MOST_OVERLOAD_S = 30.0


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=5200.0, help="requests a second")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--warmup", type=float, default=20.0)
    parser.add_argument("--prefill", type=int, default=750, help="ranks")
    parser.add_argument("--decode", type=int, default=500, help="ranks")
    parser.add_argument("--links", type=int, default=160, help="at most so many")
    parser.add_argument("--load", type=float, default=0.6, help="of the prefill ranks")
    parser.add_argument("--overload", type=float, default=1.15, help="of a second run; 0: none")
    parser.add_argument("--whole", action="store_true", help="outputs are generated, too")
    parser.add_argument("--stages", type=float, default=10.0, help="seconds; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    conversation = Conversation(find_trace(), options.seed)
    plan = Plan(
        rate=options.rate,
        seconds=options.seconds,
        warmup_s=options.warmup,
        prefill_ranks=options.prefill,
        decode_ranks=options.decode,
        ranks_per_link=max(8, -(-(options.prefill + options.decode) // (options.links - 1))),
        blocks_per_rank=BLOCKS_PER_RANK,
        load=options.load,
        whole=options.whole,
    )
    print(f"bench.fleet: {machine()}")
    print(about(conversation, plan, options.links), flush=True)
    run = measure(plan, conversation)
    print(describe(run), flush=True)
    claims = claims_of(run)
    same = replace(plan, time_factor=run.time_factor)
    if options.overload:
        over = measure(
            replace(
                same,
                load=options.overload,
                seconds=min(options.seconds, MOST_OVERLOAD_S),
                time_factor=run.time_factor * options.overload / options.load,
            ),
            conversation,
        )
        print(describe(over), flush=True)
        claims += overload_claims(over)
    if options.stages:
        print(stages(replace(same, seconds=options.stages), conversation), flush=True)
    finish("fleet", claims)
    sys.exit(0 if run.valid else 1)


def stages(plan: Plan, conversation: Conversation) -> str:
    """Where the Master's CPU time goes, from a run of its own with a sampler inside."""
    with tempfile.TemporaryDirectory() as directory:
        sampler = Observer("bench.profiled_master", Path(directory) / "samples.json")
        run = measure(plan, conversation, observer=sampler)
        return f"\n-- stages, {run.us_per_grant:.0f} us a grant with the sampler: " + report(
            sampler.out, run.us_per_grant
        )


def about(conversation: Conversation, plan: Plan, links: int) -> str:
    natural = len(conversation.turns) / conversation.length_s
    return (
        f"{plan.prefill_ranks} prefill and {plan.decode_ranks} decode ranks on at most {links}"
        f" links, {plan.ranks_per_link} a link; {plan.rate:g} requests/s for {plan.seconds:g} s"
        f" after {plan.warmup_s:g} s\n"
        f"trace: {len(conversation.turns)} requests, {conversation.num_blocks} blocks of 512 tokens"
        f" a loop; time compressed {plan.rate / natural:.0f} times, a loop every"
        f" {len(conversation.turns) / plan.rate:.2f} s; {plan.blocks_per_rank} blocks a rank;"
        f" requests end with their {'last' if plan.whole else 'first'} token"
    )


def describe(run: Run) -> str:
    window = run.window
    lines = [
        f"\n-- load {run.plan.load:.0%}: {run.plan.rate:g}/s asked, {run.granted_per_s:.0f}/s"
        f" granted; ranks busy {run.busy:.1%} (offered {run.offered:.1%}); service times x"
        f" {run.time_factor:.4f}, {run.hit:.0%} of prompt tokens cached",
        f"{'ms from the intended arrival':34}{'requests':>10}{'P50':>9}{'P95':>9}{'P99':>9}"
        f"{'P99.9':>9}{'max':>9}",
        _row("to the Grant, not held on purpose", window.at_once),
        _row("to the Grant, held for a rank", window.held),
        _row("to the Ask (generator's lateness)", window.late),
        f"{'reference: 20 cores, 5.2k/s':44}{11:9}{263:9}{858:9}",
        f"Master: {run.cpu:.1%} of a core, {run.us_per_grant:.0f} us a grant all in, waited"
        f" {run.after.queued_s - run.before.queued_s:.2f} s for the core,"
        f" {run.after.stolen_s - run.before.stolen_s:.2f} s stolen; {run.looks:.2f} looks a grant"
        f" ({run.overview['policy']['vain_looks']} of them in vain);"
        f" {run.after.rss_bytes >> 20} MB, {run.overview['prefix_map']['blocks']} blocks",
        f"fleet and generator: {run.fleet_cpu:.1%} of a core; {run.statuses} Status, {run.deltas}"
        " Delta",
        f"{'VALID' if run.valid else 'INVALID'}: generator's lateness P99"
        f" {percentiles(window.late)[2]:.2f} ms (at most {LATE_MS:g}), connections lost"
        f" {len(run.lost)}; errors {run.errors}: asked {run.asked} = ended {run.ended}, refused"
        f" {run.refused}, leases expired {run.leases_expired}, views lost {run.gaps}",
    ]
    return "\n".join(lines)


def _row(name: str, seconds: array[float]) -> str:
    numbers = "".join(f"{value:9.2f}" for value in percentiles(seconds))
    return f"{name:34}{len(seconds):10}{numbers}"


def claims_of(run: Run) -> list[Claim]:
    at_once = percentiles(run.window.at_once)
    return [
        Claim("grants/s", run.granted_per_s, 0.995 * run.plan.rate, "higher"),
        Claim("errors", run.errors, 0, "lower"),
        Claim("P99 to Grant, not held, ms", float(at_once[2]), 10, "lower"),
        Claim("P99.9 to Grant, not held, ms", float(at_once[3]), 30, "lower"),
        Claim("generator's lateness P99, ms", float(percentiles(run.window.late)[2]), 2, "lower"),
    ]


def overload_claims(run: Run) -> list[Claim]:
    """Where prompts wait, ranks that take what they can are never idle."""
    return [
        Claim("grants of what the ranks can take, overloaded", run.busy, 0.95, "higher"),
        Claim("looks a grant, overloaded", run.looks, 2, "lower"),
    ]


if __name__ == "__main__":
    main()

"""What people see of the Master: one JSON-able picture of it all, reasons of a placement."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING

import numpy as np

from rtp.core.master.columns import COLUMN, NUM_REPORTED
from rtp.core.master.contenders import ROUND_DIGITS
from rtp.core.master.members import SHOWN, Departed, Member
from rtp.core.master.placement import Reasons
from rtp.core.master.pool import Pool
from rtp.core.master.ranks import Ranks
from rtp.core.messages import STATUS_COLUMNS
from rtp.core.types import IntArray, RequestId

if TYPE_CHECKING:
    from rtp.core.master.master import Master

LAST_PLACEMENTS = 20
SHOWN_TENANTS = 32
COEFFICIENTS = ("a", "b", "c", "d", "e", "f")
Facts = dict[str, object]


def overview(master: Master, *, uptime_s: float, now: float) -> Facts:
    """Workers by id, models by name, counters; of workers that left, the last 64."""
    fleet, totals, placements = master.fleet, master.totals, master.placements
    members = list(fleet.members)
    states = dict.fromkeys(SHOWN, 0)
    for member in members:
        states[member.shown] += 1
    pools = list(fleet.pools.values())
    return {
        "term": master.term,
        "uptime_s": uptime_s,
        "status_period_s": master.links.status_period_s,
        "queue": {
            "requests": sum(pool.window.num_waiting for pool in pools),
            "tokens": sum(pool.window.num_tokens for pool in pools),
            "held": sum(pool.window.num_held for pool in pools),
            "service_s": sum(pool.window.service_s for pool in pools),
            "early": len(master.intake.early),
        },
        "models": {pool.model: _pool(pool) for pool in pools},
        "workers": {member.worker_id: _member(master, member, now) for member in members},
        "worker_states": states,
        "departed": [_departed(departed, now) for departed in fleet.members.departed],
        "frontends": len(fleet.frontends),
        "stale_messages": fleet.num_stale,
        "bookings": len(master.ledger),
        "affinity_chats": len(master.chats),
        "prefix_map": {"blocks": master.map.num_blocks, "arriving": master.map.num_arriving()},
        "cache": {
            "prompt_tokens": totals.prompt_tokens,
            "hit_tokens": totals.hit_tokens,
            "predicted_hit_tokens": totals.predicted_hit_tokens,
            "missed_predictions": totals.missed_predictions,
        },
        "requests": {
            "asked": totals.asked,
            "granted": placements.num_decisions,
            "split": placements.num_split,
            "handovers": totals.handovers,
            "held_back": sum(pool.num_held_back for pool in pools),
            "replaced": totals.replaced,
            "failed_attempts": totals.failed_attempts,
            "cancelled": totals.cancelled,
            "leases_expired": totals.leases_expired,
            "external_lapsed": totals.external_lapsed,
            "finished": dict(totals.finished),
        },
        "groups": {
            "rounds": master.rounds.num_group_rounds,
            "grants": master.rounds.num_group_grants,
        },
        "refused": dict(master.admission.counts),
        "tenants": _tenants(master, now),
        "policy": {
            "looks": placements.num_looks,
            "vain_looks": placements.num_vain,
            "tells_backlog": placements.tells_backlog,
            "fallbacks": placements.num_fallbacks,
            "last_fallback": placements.last_fallback,
        },
        "placements": [
            {"request_id": request_id, **_reasons(master, reasons)}
            for request_id, reasons in placements.last(LAST_PLACEMENTS)
        ],
    }


def placement(master: Master, request_id: RequestId) -> Facts | None:
    """The last choice for this request, and the numbers it was made on."""
    reasons = master.placements.reasons(request_id)
    return None if reasons is None else _reasons(master, reasons)


def _reasons(master: Master, reasons: Reasons) -> Facts:
    return {
        "number": reasons.number,
        "at": reasons.at,
        "num_candidates": reasons.num_candidates,
        "fallback": reasons.fallback,
        "decode": _partner(reasons),
        "candidates": [
            {
                "worker_id": reason.place[0],
                "rank": reason.place[1],
                "chosen": i == 0,
                "score": round(reason.score, ROUND_DIGITS) if isfinite(reason.score) else None,
                "matched_tokens": reason.matched_tokens,
                "wait_s": reason.wait_s,
                "prefill_s": reason.prefill_s,
            }
            for i, reason in enumerate(reasons.best)
        ],
    }


def _partner(reasons: Reasons) -> Facts | None:
    """The decode rank, and why that one; None where the request stays where it begins."""
    partner = reasons.partner
    if partner is None or reasons.decode_place is None:
        return None
    worker_id, rank = reasons.decode_place
    return {
        "worker_id": worker_id,
        "rank": rank,
        "why": partner.why,
        "token_s": partner.token_s,
        "transfer_s": partner.transfer_s,
        "transfer_tokens": partner.tokens,
        "headroom": partner.headroom if isfinite(partner.headroom) else None,
    }


def _tenants(master: Master, now: float) -> Facts:
    """Those named in the settings, the first SHOWN_TENANTS; the rest together, without names."""
    tenants, pools = master.tenants, master.fleet.pools.values()
    shown, named, others = list(tenants.usage)[:SHOWN_TENANTS], {}, asdict(tenants.others)
    for name, usage in tenants.usage.items():
        if name not in shown:
            others = {key: others[key] + value for key, value in asdict(usage).items()}
    for name in shown:
        level = tenants.level(name, now)
        standings = [pool.window.shares.find(name) for pool in pools]
        named[name] = {
            **asdict(tenants.usage[name]),
            "weight": tenants.weight(name),
            "tokens_left": level if isfinite(level) else None,
            "waiting": sum(standing.num_waiting for standing in standings if standing),
        }
    return {"accounts": len(tenants), "named": named, "others": others}


def _pool(pool: Pool) -> Facts:
    window = pool.window
    return {
        "workers": len(pool.members),
        "usable_ranks": len(pool.rows),
        "block_size": pool.block_size,
        "max_model_len": pool.max_model_len,
        "waiting": window.num_waiting,
        "waiting_tokens": window.num_tokens,
        "held": window.num_held,
        "pairs": pool.pairs is not None,
        "held_back": pool.num_held_back,
        "granted": window.num_grants,
        "lead_s": pool.lead.seconds,
        "expected_output_tokens": pool.outputs.mean,
    }


def _member(master: Master, member: Member, now: float) -> Facts:
    register, hardware = member.register, member.hardware
    return {
        "epoch": register.epoch,
        "address": register.address,
        "role": str(register.role),
        "model": register.model,
        "state": member.shown,
        "draining": member.draining,
        "group": _group(member),
        "silent_s": now - member.heard_at if member.heard_at else None,
        "view": {
            "version": member.version,
            "age_s": now - member.viewed_at if member.viewed_at else None,
            "resyncs": member.num_resyncs,
            "gaps": member.num_gaps,
            "late": member.num_late,
            "source": member.view_source,
        },
        "failures": member.num_failures,
        "predictor": {
            "coefficients": dict(zip(COEFFICIENTS, hardware.coefficients.tolist(), strict=True)),
            "prefill_error": hardware.prefill.error,
            "prefill_samples": hardware.prefill.num_samples,
            "decode_error": hardware.decode.error,
            "decode_samples": hardware.decode.num_samples,
        },
        "ranks": _ranks(master.ranks, member.rows, now),
    }


def _group(member: Member) -> Facts | None:
    """Of ranks that step together: how often, and what it costs them."""
    cost = member.group
    if cost is None:
        return None
    return {
        "steps": cost.steps,
        "dummy_steps": cost.dummy_steps,
        "step_s": cost.step_s,
        "wait_s": cost.wait_s,
        "wait_share": cost.wait_share,
    }


def _ranks(ranks: Ranks, rows: IntArray, now: float) -> list[Facts]:
    """Whole columns at a time: there may be a thousand."""
    own = {
        "charged_tokens": ranks.charged_tokens,
        "charged_requests": ranks.charged_requests,
        "reserved_tokens": ranks.reserved_tokens,
        "held": ranks.held,
    }
    names = (*STATUS_COLUMNS[:NUM_REPORTED], *own, "headroom", "busy_s")
    reported = ranks.reported[:, rows]
    expected = (
        reported[COLUMN["prefill_tokens"]]
        + ranks.charged_tokens[rows]
        + ranks.reserved_tokens[rows]
    )
    columns = [*(column[rows] for column in own.values()), reported[COLUMN["kv_free"]] - expected]
    counts = np.concatenate([reported, columns])
    busy_s = np.maximum(ranks.busy_until[rows] - now, 0.0).tolist()
    table = zip(*counts.astype(np.int64).tolist(), busy_s, strict=True)
    return [dict(zip(names, row, strict=True)) for row in table]


def _departed(departed: Departed, now: float) -> Facts:
    facts = asdict(departed)
    del facts["at"]
    return facts | {"state": str(departed.state), "ago_s": now - departed.at}

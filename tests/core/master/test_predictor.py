"""The predictor finds true coefficients, stays positive, forgets; a hung step does not fool it."""

from __future__ import annotations

import numpy as np
import pytest

from rtp.core.master.predictor import (
    DEFAULT_PROFILE,
    HardwareClass,
    OutputLengths,
    RankPredict,
    decode_seconds,
    prefill_seconds,
)
from tests.support.fleet import Fleet

TRUE = np.array([4e-3, 3e-5, 4e-10, 2e-3, 1.5e-4, 3e-8])


def teach(hardware: HardwareClass, true: np.ndarray, count: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        new, cached = int(rng.lognormal(6, 1.5)) + 1, int(rng.integers(0, 8000))
        noise = rng.lognormal(0, 0.05)
        hardware.observe_prefill(new, cached, float(prefill_seconds(true, new, cached)) * noise)
        batch, context = float(rng.integers(1, 64)), float(rng.integers(100, 50_000))
        noise = rng.lognormal(0, 0.05)
        hardware.observe_decode(batch, context, float(decode_seconds(true, batch, context)) * noise)


def worst_error(hardware: HardwareClass, true: np.ndarray) -> float:
    learned = hardware.coefficients
    new, cached = np.meshgrid([50.0, 1000.0, 8000.0], [0.0, 4000.0])
    prefill = prefill_seconds(learned, new, cached) / prefill_seconds(true, new, cached)
    batch, context = np.meshgrid([1.0, 8.0, 60.0], [100.0, 50_000.0])
    decode = decode_seconds(learned, batch, context) / decode_seconds(true, batch, context)
    return float(np.abs(np.log(np.stack([prefill, decode]))).max())


@pytest.mark.parametrize("profile", [(), tuple(TRUE * 3), tuple(TRUE / 5)])
def test_it_converges_from_wrong_starts(profile: tuple[float, ...]):
    hardware = HardwareClass(profile)
    teach(hardware, TRUE, 400)
    assert worst_error(hardware, TRUE) < 0.15
    assert hardware.prefill.error < 0.1
    assert hardware.decode.error < 0.1


def test_it_follows_a_machine_that_becomes_twice_as_slow():
    hardware = HardwareClass(tuple(TRUE))
    teach(hardware, TRUE, 300)
    teach(hardware, TRUE * 2, 500, seed=1)
    assert worst_error(hardware, TRUE * 2) < 0.15


def test_coefficients_stay_positive_whatever_is_measured():
    hardware = HardwareClass(tuple(TRUE))
    rng = np.random.default_rng(3)
    for _ in range(500):
        hardware.observe_prefill(int(rng.integers(1, 5000)), 0, float(rng.lognormal(-5, 3)))
        hardware.observe_decode(8.0, 1000.0, float(rng.lognormal(-5, 3)))
    assert (hardware.coefficients > 0).all()
    assert np.isfinite(hardware.coefficients).all()


def test_long_runs_of_the_same_sample_do_not_blow_up_what_they_do_not_tell_of():
    hardware = HardwareClass(tuple(TRUE))
    for _ in range(4000):
        hardware.observe_prefill(100, 0, float(prefill_seconds(TRUE, 100, 0)))
    hardware.observe_prefill(4000, 4000, float(prefill_seconds(TRUE, 4000, 4000)))
    assert worst_error(hardware, TRUE) < 0.1


def test_samples_without_noise_teach_for_ever():
    """Rounding must not add up: after a long time it learns as well as at first."""
    hardware = HardwareClass(tuple(TRUE))
    rng = np.random.default_rng(1)
    prompts = np.exp(rng.normal(8, 1.2, 20_000)).astype(int) + 1
    for pace in (1.0, 0.5, 0.6):
        for new in prompts.tolist():
            cached = new // 2 if new % 3 else 0
            seconds = float(prefill_seconds(pace * TRUE, new, cached))
            hardware.observe_prefill(new, cached, seconds)
        learned = hardware.coefficients[:3]
        assert prefill_seconds(learned, 3000, 1000) == pytest.approx(
            prefill_seconds(pace * TRUE, 3000, 1000), rel=1e-3
        )
    assert hardware.prefill.error < 1e-3


def test_one_hung_step_does_not_teach_much():
    hardware = HardwareClass(tuple(TRUE))
    teach(hardware, TRUE, 300)
    hardware.observe_prefill(1000, 0, 60.0)
    teach(hardware, TRUE, 20, seed=2)
    assert worst_error(hardware, TRUE) < 0.3


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_measurement_is_ignored(seconds: float):
    hardware = HardwareClass(tuple(TRUE))
    hardware.observe_prefill(100, 0, seconds)
    assert hardware.prefill.num_samples == 0
    assert np.allclose(hardware.coefficients, TRUE)


@pytest.mark.parametrize("profile", [(), (1.0, 2.0), (1.0,) * 5 + (-1.0,), (float("nan"),) * 6])
def test_a_profile_that_is_none_gives_the_default(profile: tuple[float, ...]):
    assert np.allclose(HardwareClass(profile).coefficients, DEFAULT_PROFILE)


def test_ranks_of_different_hardware_are_predicted_each_by_its_own():
    predict = RankPredict(np.stack([TRUE, TRUE * 10], axis=1))
    seconds = predict.prefill_s(np.array([1000.0, 1000.0]), np.zeros(2))
    assert seconds[1] == pytest.approx(10 * seconds[0])
    assert predict.decode_s(np.array([4.0, 4.0]), np.array([100.0, 100.0])).shape == (2,)


def test_output_lengths_are_learned_by_tenant_and_bounded():
    outputs = OutputLengths(capacity=10)
    assert outputs.expected("new", 1000) == 128
    assert outputs.expected("new", 20) == 20
    for _ in range(300):
        outputs.observe("short", 10.0)
        outputs.observe("long", 500.0)
    assert outputs.expected("short", 1000) == 10
    assert outputs.expected("long", 1000) == 500
    for i in range(100):
        outputs.observe(f"t{i}", 300.0)
    assert outputs.expected("short", 1000) == outputs.expected("other", 1000) > 100


def test_the_master_learns_from_first_tokens_and_decode_steps():
    fleet = Fleet()
    worker = fleet.add()
    for i in range(60):
        grant = fleet.grant(fleet.ask(500 + 40 * i))
        fleet.first_token(grant, 500 + 40 * i, 0, 2 * (1e-3 + 1e-5 * (500 + 40 * i)))
        fleet.finish(grant)
        fleet.report(
            worker, decode_rows=8, running=8, context_tokens=1000 + i, step_us=9000, kv_free=50_000
        )
        fleet.report(worker, decode_rows=0, running=0, context_tokens=0, kv_free=100_000)
        fleet.report(worker, decode_rows=8, running=8, context_tokens=1000 + i, step_us=9000)
        fleet.report(worker, decode_rows=8, running=8, context_tokens=1008 + i, step_us=9000)
    told = fleet.master.overview(fleet.now)["workers"]["w0"]["predictor"]
    assert told["prefill_samples"] == 60
    assert told["decode_samples"] > 50
    assert told["prefill_error"] < 0.1
    learned = np.array(list(told["coefficients"].values()))
    assert float(prefill_seconds(learned, 1000.0, 0.0)) == pytest.approx(0.022, rel=0.1)
    assert float(decode_seconds(learned, 8.0, 1000.0)) == pytest.approx(0.009, rel=0.1)


def test_the_lead_follows_the_measured_gap():
    fleet = Fleet()
    fleet.add()
    for _ in range(64):
        grant = fleet.grant(fleet.ask(100))
        fleet.now += 0.012
        fleet.first_token(grant, 100, 0, 0.002)
        fleet.finish(grant)
    lead_s = fleet.master.overview(fleet.now)["models"]["m"]["lead_s"]
    assert lead_s == pytest.approx(0.010, rel=0.01)


def test_one_noisy_profile_does_not_tell_equal_ranks_apart():
    """The best measurement of a hardware class counts for all of it, whoever registers first."""
    noisy = tuple(TRUE * 3)
    for profiles in ([noisy, tuple(TRUE)], [tuple(TRUE), noisy], [(), noisy, tuple(TRUE)]):
        fleet = Fleet()
        for i, profile in enumerate(profiles):
            fleet.add(f"w{i}", profile=profile, hardware="cpu x1")
        workers = fleet.master.overview(fleet.now)["workers"].values()
        found = [list(worker["predictor"]["coefficients"].values()) for worker in workers]
        assert np.allclose(found, TRUE)


def test_what_serving_taught_outlasts_another_start():
    hardware = HardwareClass(tuple(TRUE))
    teach(hardware, TRUE * 2, 100)
    hardware.offer(tuple(TRUE / 2))
    assert worst_error(hardware, TRUE * 2) < 0.15


def test_other_hardware_or_another_batch_is_predicted_by_its_own():
    fleet = Fleet()
    fleet.add("w0", profile=tuple(TRUE), hardware="cpu x1")
    fleet.add("w1", profile=tuple(TRUE * 3), hardware="cpu x2")
    fleet.add("w2", profile=tuple(TRUE * 5), hardware="cpu x1", max_batch_tokens=64)
    workers = fleet.master.overview(fleet.now)["workers"].values()
    found = [list(worker["predictor"]["coefficients"].values()) for worker in workers]
    assert np.allclose(found, [TRUE, TRUE * 3, TRUE * 5])

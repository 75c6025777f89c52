"""The pure parts of benchmarks/soak.py: slopes with their errors on made-up samples, and the series."""

import os
import random
import subprocess
import sys
from itertools import accumulate

import pytest
import soak
from soak_slopes import SAMPLES_MIN, slope

TIMES_S = [5.0 * at for at in range(720)]


def noise(seed: int, rho: float, scale: float = 1.0) -> list[float]:
    """An autoregressive process of first order with this spread."""
    rng = random.Random(seed)
    steps = [rng.gauss(0, scale * (1 - rho * rho) ** 0.5) for _ in TIMES_S]
    return list(accumulate(steps, lambda before, step: rho * before + step))


def test_a_line_by_hand() -> None:
    found = slope(TIMES_S, [100 + at / 60 for at in TIMES_S])
    assert found.per_hour == pytest.approx(60.0)
    assert found.error_per_hour == pytest.approx(0.0, abs=1e-6)
    assert found.verdict == "grows"
    assert slope(TIMES_S, [100 - at / 60 for at in TIMES_S]).verdict == "shrinks"
    assert slope(TIMES_S, [7.0] * len(TIMES_S)).verdict == "flat"


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_noise_without_a_slope_is_seldom_called_one(rho: float) -> None:
    """At three errors one of 370 would be; independent errors would call a third of those with rho = 0.9."""
    verdicts = [slope(TIMES_S, noise(seed, rho)).verdict for seed in range(100)]
    assert verdicts.count("flat") >= 96


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_the_error_is_the_spread_of_slopes(rho: float) -> None:
    found = [slope(TIMES_S, noise(seed, rho)) for seed in range(100)]
    spread = (sum(one.per_hour**2 for one in found) / len(found)) ** 0.5
    error = sum(one.error_per_hour for one in found) / len(found)
    assert 0.75 < error / spread < 1.35


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_a_leak_within_the_noise_is_found(rho: float) -> None:
    """Noise of 1 MB, and 4 MB an hour on top of it."""
    for seed in range(20):
        leaking = [4.0 * at / 3600 + value for at, value in zip(TIMES_S, noise(seed, rho), strict=True)]
        assert slope(TIMES_S, leaking).verdict == "grows"


def test_too_few_samples_say_nothing() -> None:
    few = SAMPLES_MIN - 1
    assert slope(TIMES_S[:few], TIMES_S[:few]).verdict == "short"
    assert slope([], []).verdict == "short"
    assert slope([3.0] * 40, [float(at) for at in range(40)]).verdict == "short"


def test_lives_are_told_apart_and_their_beginnings_left_out() -> None:
    """A process that grows while it starts, and is then flat; its successor is larger, the region as a whole grows."""
    samples = [
        soak.Sample(at, "a", "daemon", life, {"rss_bytes": base + (0 if at - start >= soak.WARM_UP_S else 1000)})
        for life, start, base in (("1", 0.0, 50.0), ("2", 600.0, 90.0))
        for at in (start + 5.0 * step for step in range(120))
    ]
    rows = soak.judge(samples)
    lives = {row.life: row for row in rows if row.life}
    assert {life: row.slope.verdict for life, row in lives.items()} == {"1": "flat", "2": "flat"}
    (whole,) = [row for row in rows if not row.life]
    assert whole.slope.per_hour > 0
    assert whole.slope.mean == pytest.approx(70.0)


def test_short_lives_are_not_judged() -> None:
    samples = [soak.Sample(5.0 * at, "a", "learner", "1", {"threads": float(at)}) for at in range(30)]
    assert [row.life for row in soak.judge(samples)] == [""]


def test_the_own_process_can_be_read() -> None:
    found = soak.read_process(os.getpid())
    assert found is not None
    life, figures = found
    assert figures["rss_bytes"] >= figures["pss_bytes"] > 1 << 20
    assert figures["rss_bytes"] >= figures["anon_bytes"] > 1 << 20
    assert figures["threads"] >= 1
    assert figures["descriptors"] >= 3
    assert life == soak.read_process(os.getpid())[0]  # type: ignore[index]
    assert soak.read_process(2**22 + 1) is None


def test_what_a_process_started_is_found() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in soak.children(os.getpid())
        child.communicate(b"\n")
    assert child.pid not in soak.children(os.getpid())
    assert soak.children(2**22 + 1) == []

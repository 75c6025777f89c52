"""The schedule of two regions and a witness: sites cut, killed and lost with their disks, a bucket with its faults."""

from __future__ import annotations

import pytest

from diloco_node.core.ledger import witness
from diloco_node.errors import ConfigError
from diloco_node.lab.sim.simulation import simulate
from diloco_node.lab.sim.site_faults import SITES

pytestmark = pytest.mark.world

SEEDS = range(1, 5)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_keeps_its_promises(seed: int) -> None:
    report = simulate(seed, schedule=SITES, events=2000)
    assert report.is_good, report.violations[:2]
    assert report.regions == 2
    assert sum(report.faults.values()) >= 5


def find(words: str, *, seeds: range = range(1, 20)) -> str:
    """The first violation of the seeds; it has these words."""
    for seed in seeds:
        if violations := simulate(seed, schedule=SITES, events=2000).violations:
            assert any(words in text for text in violations), violations
            return violations[0]
    raise AssertionError("nobody noticed")


def test_an_acknowledgement_without_the_payload_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = witness.answer
    monkeypatch.setattr(
        witness, "answer", lambda record, peer, message, _, **limits: answer(record, peer, message, _true, **limits)
    )
    find("which is only on the disks of")


def _true(_: object) -> bool:
    return True


def test_only_the_fast_effects_have_a_bucket() -> None:
    with pytest.raises(ConfigError, match="with effects 'fast'"):
        simulate(1, schedule=SITES, effects="daemon")

"""The versions that a region offers to its learner."""

from dataclasses import replace

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import ApplyVersion, Effect, OfferVersion
from diloco_node.core.recovery.versions import Versions
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.types import EntryBody, LearnerStatus, Recovered
from tests.kit.rounds_kit import (
    GENESIS,
    MANIFEST,
    Ledger,
    committed_round,
    contribution,
    position,
    status,
)
from tests.kit.versions_kit import Disk


class Desk:
    """Region a with a learner."""

    def __init__(self) -> None:
        self.effects = EffectBuffer("a")
        self.history = RoundHistory(2)
        self.ledger = Ledger()
        self.versions = Versions(
            region="a",
            fragments=2,
            manifest_digest=MANIFEST.digest,
            recovery=Recovered(0, "", (), (-1, -1), frozenset()),
            history=self.history,
            effects=self.effects,
        )

    def commit(self, *bodies: EntryBody) -> None:
        for body in bodies:
            self.history.apply(self.ledger.add(body), now_ns=0)

    def apply(self, fragment: int, version: int) -> list[Effect]:
        self.versions.version_applied(fragment, version)
        return self.effects.take()

    def attach(self, learner: LearnerStatus | None) -> list[Effect]:
        self.versions.learner_attached(learner)
        return self.effects.take()


NEW = status(0, f0=position(base=-1), f1=position(base=-1))


INCLUDED = committed_round(0, 1, [contribution("a", steps=(0, 10), snapshot=5)])


WITHOUT = committed_round(0, 2, [contribution("b", base=1, steps=(0, 10))])


def test_new_learner_is_offered_everything_that_is_applied() -> None:
    desk = Desk()
    desk.commit(GENESIS)
    assert desk.apply(0, 0) == [], "nobody is there"
    assert desk.attach(NEW) == [OfferVersion(0, 0, -1)]
    assert desk.apply(1, 0) == [OfferVersion(1, 0, -1)]
    assert desk.apply(1, 0) == [], "once"


def test_offer_names_the_snapshot_of_this_incarnation() -> None:
    desk = Desk()
    desk.attach(status(12))
    desk.commit(GENESIS, INCLUDED)
    assert desk.apply(0, 1) == [OfferVersion(0, 1, 5)]
    assert desk.attach(status(0, incarnation=2)) == [OfferVersion(0, 1, -1)]


def test_offer_over_several_versions_names_the_last_inclusion() -> None:
    desk = Desk()
    desk.attach(status(12))
    desk.commit(GENESIS, INCLUDED, WITHOUT)
    assert desk.apply(0, 2) == [OfferVersion(0, 2, 5)]


def test_last_round_of_a_fragment_is_offered_as_such() -> None:
    desk = Desk()
    desk.attach(status(12))
    desk.commit(GENESIS, INCLUDED, replace(WITHOUT, is_last=True))
    assert desk.history.is_last_round(0, 2)
    assert not desk.history.is_last_round(0, 1)
    assert not desk.history.is_last_round(1, 2)
    assert desk.apply(0, 2) == [OfferVersion(0, 2, 5, is_last=True)]


def test_version_that_includes_nothing_says_so() -> None:
    desk = Desk()
    desk.attach(status(12, f0=position(base=1, step=10)))
    desk.commit(GENESIS, INCLUDED, WITHOUT)
    assert desk.apply(0, 2) == [OfferVersion(0, 2, -1)]


def test_older_version_than_the_learner_has_is_never_offered() -> None:
    desk = Desk()
    desk.commit(GENESIS, INCLUDED)
    desk.attach(status(12, f0=position(base=2)))
    assert desk.apply(0, 1) == []


def test_learner_with_work_of_its_own_waits_until_the_ledger_is_known() -> None:
    desk = Desk()
    desk.attach(status(12))
    assert desk.apply(0, 1) == [], "recovered from disk, the ledger is not read yet: is its snapshot in it?"
    desk.commit(GENESIS, INCLUDED)
    desk.versions.offer(0)
    assert desk.effects.take() == [OfferVersion(0, 1, 5)]


def test_new_learner_does_not_wait_for_the_ledger() -> None:
    desk = Desk()
    desk.attach(NEW)
    assert desk.apply(0, 1) == [OfferVersion(0, 1, -1)]


def test_new_learner_is_offered_nothing_older_than_its_own_disk_can_give_at_once() -> None:
    """After a restart rounds are committed again, all at once, and applied one by one."""
    disk = Disk()
    disk.begin()
    disk.store(INCLUDED)
    disk.commit(INCLUDED)
    disk.versions.learner_attached(replace(NEW, incarnation=2))
    assert disk.pump() == [OfferVersion(1, 0, -1), ApplyVersion(INCLUDED)]
    disk.commit(WITHOUT)
    disk.versions.version_applied(0, 1)
    assert disk.pump() == [OfferVersion(0, 1, -1)], "a payload that is not here may take minutes"
    disk.store(WITHOUT)
    assert disk.pump() == [ApplyVersion(WITHOUT)]


def test_learner_that_attaches_again_is_offered_again_what_it_has_not_applied() -> None:
    desk = Desk()
    desk.attach(status(12))
    desk.commit(GENESIS, INCLUDED)
    desk.apply(0, 1)
    assert desk.attach(None) == []
    assert desk.attach(status(13)) == [OfferVersion(0, 1, 5)]
    assert desk.attach(status(13, f0=position(base=1, step=10))) == []


def test_a_new_learner_is_not_offered_what_the_ledger_begins_behind() -> None:
    """A state that was requested before the ledger's base went on, and comes late."""
    desk = Desk()
    desk.commit(GENESIS, INCLUDED, WITHOUT)
    desk.versions.begin_at(3)
    desk.attach(NEW)
    assert desk.apply(0, 1) == []
    assert desk.apply(0, 2) == [OfferVersion(0, 2, 5)]

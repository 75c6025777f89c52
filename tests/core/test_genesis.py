"""core/genesis.py: one proposal in each term that this region leads, with all of Theta_0."""

from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import Note
from diloco_node.core.genesis import Genesis
from diloco_node.core.recovery.fetches import Fetches
from diloco_node.core.recovery.versions import Versions
from diloco_node.core.rounds.entry_check import ledger_fault
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.types import Recovered
from tests.kit.ledger_kit import disk_of
from tests.kit.rounds_kit import DIGESTS, GENESIS, MANIFEST, REGIONS, context_of

RUN = ("run", "settings", MANIFEST.digest, REGIONS)


class Place:
    """Region a; its role in the ledger is set by hand."""

    def __init__(self) -> None:
        self.effects = EffectBuffer("a")
        self.history = RoundHistory(2)
        self.versions = Versions(
            region="a",
            fragments=2,
            manifest_digest=MANIFEST.digest,
            recovery=Recovered(0, "", (), (), frozenset()),
            history=self.history,
            effects=self.effects,
        )
        self.fetches = Fetches(region="a", regions=REGIONS, effects=self.effects)
        self.ledger = SimpleNamespace(
            term=1, last_index=0, base=SimpleNamespace(index=0), founders={name: disk_of(name) for name in REGIONS}
        )
        self.leader = SimpleNamespace(is_acting=True, proposals=deque())
        self.genesis = Genesis(
            RUN,
            context_of(self.history, settings=self.history.settings, effects=self.effects),
            ledger=cast(Any, self.ledger),
            leader=cast(Any, self.leader),
            versions=self.versions,
            fetches=self.fetches,
        )


def test_a_leader_proposes_once_in_a_term_when_its_disk_holds_theta_0() -> None:
    place = Place()
    place.genesis.propose()
    assert not place.leader.proposals
    place.versions.initial_state_stored(DIGESTS)
    place.genesis.propose()
    place.genesis.propose()
    settings = (SettingsBody.of(place.history.settings),)
    genesis = replace(GENESIS, disks=tuple(disk_of(name) for name in REGIONS), settings=settings)
    assert list(place.leader.proposals) == [genesis]
    place.ledger.term = 2
    place.genesis.propose()
    assert list(place.leader.proposals) == [genesis] * 2


def test_genesis_has_the_frozen_tensors_of_the_learner_that_attached_last() -> None:
    place = Place()
    place.versions.initial_state_stored(DIGESTS)
    place.genesis.listing = b"frozen"
    place.genesis.propose()
    assert [body.listing for body in place.leader.proposals] == [b"frozen"]


def test_nothing_is_proposed_by_others_or_after_genesis() -> None:
    place = Place()
    place.versions.initial_state_stored(DIGESTS)
    place.leader.is_acting = False
    place.genesis.propose()
    place.leader.is_acting, place.history.genesis = True, GENESIS
    place.genesis.propose()
    place.leader.is_acting, place.history.genesis, place.ledger.founders = True, None, {}
    place.genesis.propose()
    assert not place.leader.proposals, "the log names folders already"


def test_nothing_is_proposed_while_a_fetch_may_replace_theta_0() -> None:
    place = Place()
    place.versions.initial_state_stored(DIGESTS)
    place.fetches.request(0, 0, None, digest=b"other")
    place.fetches.pump(leader="b", alive=("b",), now_ns=0)
    place.genesis.propose()
    assert not place.leader.proposals


def test_theta_0_of_two_regions_is_not_proposed_and_a_learner_lays_it_down_again() -> None:
    place = Place()
    place.versions.initial_state_stored(DIGESTS)
    assert not place.genesis.wants_initial_state
    place.versions.state_stored(0, 0, b"other" * 6)
    place.genesis.propose()
    assert not place.leader.proposals
    assert place.genesis.wants_initial_state
    place.fetches.request(1, 0, None, digest=b"more." * 6)
    assert not place.genesis.wants_initial_state, "a fetch may still make it whole"


def test_a_ledger_of_another_run_is_named() -> None:
    for other in ({"run_id": "x"}, {"manifest_digest": "x"}, {"regions": ("a", "b")}):
        assert ledger_fault(RUN, replace(GENESIS, **other))  # type: ignore[arg-type]
    assert ledger_fault(RUN, replace(GENESIS, run_id="x")) == (
        "the ledger is of another run: its run.id is x, here it is run"
    )


def test_a_run_whose_settings_changed_is_still_the_same() -> None:
    place = Place()
    place.genesis.on_commit(replace(GENESIS, settings_digest="other"))
    (note,) = [effect for effect in place.effects.take() if isinstance(effect, Note)]
    assert not note.is_alarm
    assert note.text.endswith("has begun; settings were changed since it began")

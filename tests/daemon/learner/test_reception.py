"""Who is welcomed when: a learner that would train past the run's end waits, and is told why."""

from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_node.core.data_shards import region_shards
from diloco_node.core.ledger.entries import seal
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.rounds.progress import RunPosition
from diloco_node.core.types import Contribution, EntryBody, GenesisBody, LeaderBody, RunSettings
from diloco_node.daemon.learner import reception as reception_module
from diloco_node.daemon.learner.proxy import LearnerFacts
from diloco_node.daemon.learner.reception import Reception
from diloco_node.errors import StorageError
from diloco_node.storage.trained import Trained
from diloco_node.wire.frozen_listing import FrozenTensor, pack_frozen
from diloco_node.wire.learner_link import (
    LINK_PROTOCOL,
    NEW_PROCESS,
    NO_SNAPSHOT,
    TO_LEARNER,
    UNATTACHED,
    Attach,
    Report,
    RunAdvanced,
    SettingsChanged,
    ShardsGiven,
    SnapshotReady,
    Welcome,
)
from tests.kit.node_kit import MANIFEST

LACK = "the run is at its end here, and no majority is there to close it"


@pytest.mark.parametrize(
    ("incarnation", "lack", "reason"),
    [(NEW_PROCESS, LACK, LACK), (NEW_PROCESS, "", "welcomed"), (3, LACK, "welcomed")],
    ids=["a new process waits", "before the end", "one that trains goes on"],
)
async def test_a_new_process_past_the_end_waits_for_a_majority(
    monkeypatch: pytest.MonkeyPatch, incarnation: int, lack: str, reason: str
) -> None:
    refusals: list[tuple[str, bool]] = []
    tasks: list[Any] = []

    async def read(*_: object) -> None:
        raise StorageError("welcomed")  # the next that a welcome asks for

    monkeypatch.setattr(reception_module, "in_thread", read)
    runtime: Any = SimpleNamespace(
        spec=SimpleNamespace(settings=RunSettings(), run_id="run"),
        notes=SimpleNamespace(add=lambda _: None),
        spawn=lambda work, _: tasks.append(work),
        threads=SimpleNamespace(disk=None),
        now_ns=lambda: 0,
        learner_server=SimpleNamespace(refuse=lambda text, *, is_final: refusals.append((text, is_final))),
    )
    core: Any = SimpleNamespace(
        may_allot_incarnation=True,
        incarnation_rule=lambda newest: newest + 1,
        ledger=SimpleNamespace(leader=""),
        end=SimpleNamespace(unclosed_end=lambda _leader, *, now_ns: lack),
    )
    learner: Any = SimpleNamespace(attach_fault=lambda *_, **__: "")
    fragments = len(MANIFEST.fragments)
    positions = () if incarnation == NEW_PROCESS else (UNATTACHED,) * fragments
    snapshots = () if incarnation == NEW_PROCESS else (NO_SNAPSHOT,) * fragments
    attach = Attach(LINK_PROTOCOL, 1, MANIFEST.tensors, incarnation, "", 0, 0, 0, positions, snapshots)
    Reception(runtime, MANIFEST, core, learner).on_message(attach)
    await tasks[0]
    assert refusals == [(reason, False)]


DIGESTS = tuple(bytes([index]) * 32 for index in range(len(MANIFEST.fragments)))


class Desk:
    """A reception that welcomes."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, lives: tuple[Trained, ...] = (), init: Path | None = None
    ) -> None:
        self.now_ns = 1
        self.lack = ""
        self.newest = -1
        self.said: list[Any] = []
        self.tasks: list[Any] = []
        self.warned: list[Any] = []
        self.refusals: list[str] = []
        self.alarms: list[str] = []

        async def read(*_: object) -> Any:
            return 2, lives, ()

        monkeypatch.setattr(reception_module, "in_thread", read)
        spec = SimpleNamespace(
            settings=RunSettings(), run_id="run", region="a", regions=("a", "b"), init=init, state_dir=Path("/state/a")
        )
        runtime: Any = SimpleNamespace(
            spec=spec,
            notes=SimpleNamespace(add=lambda note: self.alarms.append(note.text)),
            spawn=lambda work, _: self.tasks.append(work),
            threads=SimpleNamespace(disk=None),
            now_ns=lambda: self.now_ns,
            learner_server=SimpleNamespace(
                send=self.said.append, refuse=lambda reason, *, is_final: self.refusals.append(reason)
            ),
        )
        history: Any = RoundHistory(len(DIGESTS), ("a", "b"))
        history.genesis = GenesisBody("run", MANIFEST.digest, "", ("a", "b"), DIGESTS)
        history.account.newest_incarnation = lambda _: self.newest
        core: Any = SimpleNamespace(
            may_allot_incarnation=True,
            incarnation_rule=lambda newest: newest + 1,
            wants_initial_state=False,
            ledger=SimpleNamespace(
                leader="b", has_caught_up=True, disks=SimpleNamespace(roster=Roster.of_voters("ab"))
            ),
            end=SimpleNamespace(
                unclosed_end=lambda _leader, *, now_ns, own_steps=0: self.lack if own_steps >= 200 else ""
            ),
            leader=SimpleNamespace(progress=SimpleNamespace(position=lambda *, now_ns: RunPosition(8, None))),
            history=history,
        )
        learner: Any = SimpleNamespace(
            attach_fault=lambda *_, **__: "",
            on_attach=lambda *_, **__: None,
            on_message=self.warned.append,
            facts=LearnerFacts(),
            steps_total=200,
        )
        self.core = core
        self.reception = Reception(runtime, MANIFEST, core, learner)

    async def welcome(self, listing: bytes = b"") -> Welcome:
        self.reception.on_message(Attach(LINK_PROTOCOL, 1, MANIFEST.tensors, NEW_PROCESS, "", 0, 0, 0, (), (), listing))
        await self.tasks[0]
        return next(message for message in self.said if isinstance(message, Welcome))

    def shards(self) -> list[tuple[int, ...]]:
        return [message.shards for message in self.said if isinstance(message, ShardsGiven)]

    def commit(self, body: EntryBody) -> None:
        index = self.core.history.account.index + 1
        self.core.history.apply(seal(index, 1, bytes(32), body), now_ns=0)
        self.reception.core_changed()

    def holds(self) -> list[str]:
        """Of each news of the position, why the learner is to make no steps; each once."""
        return [reason for reason, _ in groupby(message.reason for message in self.positions())]

    def positions(self) -> list[RunAdvanced]:
        return [message for message in self.said if isinstance(message, RunAdvanced)]


@pytest.mark.parametrize(
    ("newest", "lives", "init", "expected"),
    [
        (-1, (), None, DIGESTS),
        (-1, (Trained(1, 0, 0),), None, DIGESTS),  # it died in its imports
        (-1, (Trained(1, 3, 9),), None, ()),
        (2, (), None, ()),  # its folder was lost
        (-1, (), Path("first.safetensors"), ()),
    ],
    ids=["new", "no step yet", "resumes", "known to the others", "run.init"],
)
async def test_only_a_new_region_hears_with_what_a_script_began_the_run(
    monkeypatch: pytest.MonkeyPatch,
    newest: int,
    lives: tuple[Trained, ...],
    init: Path | None,
    expected: tuple[bytes, ...],
) -> None:
    desk = Desk(monkeypatch, lives, init)
    desk.newest = newest
    welcome = await desk.welcome()
    assert welcome.fragment_digests == expected
    assert (welcome.region_index, welcome.regions) == (0, ("a", "b"))


@pytest.mark.parametrize("is_begun", [True, False])
async def test_a_learner_on_another_base_is_told_once_when_the_run_has_begun(
    monkeypatch: pytest.MonkeyPatch, is_begun: bool
) -> None:
    base = FrozenTensor("base.weight", "float32", (4, 3), 1.0, 2.0)
    desk = Desk(monkeypatch)
    genesis = replace(desk.core.history.genesis, listing=pack_frozen(1, [base]))
    desk.core.history.genesis = genesis if is_begun else None
    await desk.welcome(pack_frozen(0, [replace(base, norm=3.0)]))
    assert len(desk.warned) == is_begun
    desk.core.history.genesis = genesis
    desk.reception.core_changed()
    desk.reception.core_changed()
    (warning,) = desk.warned
    assert "region b, which began the run: of 1, 1 hold other values (base.weight)" in warning.text


async def test_a_learner_on_the_same_base_hears_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = pack_frozen(0, [FrozenTensor("base.weight", "float32", (4, 3), 1.0, 2.0)])
    desk = Desk(monkeypatch)
    desk.core.history.genesis = replace(desk.core.history.genesis, listing=listing)
    await desk.welcome(listing)
    assert desk.warned == []


async def test_a_learner_that_comes_past_the_end_without_a_leader_is_held_until_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    desk = Desk(monkeypatch)
    await desk.welcome()
    assert desk.holds() == [""]
    desk.lack = LACK

    def report(after_ns: int) -> list[str]:
        desk.now_ns += after_ns
        desk.reception.on_message(Report(1, 1, None, 1, 1, None, None, 8, None))
        return desk.holds()[1:]

    assert report(reception_module.POSITION_EVERY_NS) == []
    assert report(reception_module.LACK_NS - 1) == [], "an election may be on"
    assert report(reception_module.POSITION_EVERY_NS) == [LACK]
    desk.reception.core_changed()
    assert desk.holds()[1:] == [LACK]
    desk.lack = ""
    desk.reception.core_changed()
    assert desk.holds()[1:] == [LACK, ""], "a held learner reports nothing"


async def test_a_learner_hears_where_the_run_is_also_while_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone it would go on by its own steps to the end of its schedule, and never come back from there."""
    desk = Desk(monkeypatch)
    await desk.welcome()
    for after_ns, count in ((reception_module.POSITION_EVERY_NS, 2), (1, 2), (reception_module.POSITION_EVERY_NS, 3)):
        desk.now_ns += after_ns
        desk.reception.on_message(Report(1, 1, None, 1, 1, None, None, 8, None))
        assert desk.positions() == count * [RunAdvanced(8, None)]


async def test_the_learner_hears_of_its_shards_with_its_welcome_and_once_of_each_change(
    monkeypatch: pytest.MonkeyPatch,
):
    desk = Desk(monkeypatch)
    desk.reception.core_changed()
    assert desk.shards() == [], "nobody was welcomed yet"
    await desk.welcome()
    both, three = region_shards("run", "a", ("a", "b")), region_shards("run", "a", ("a", "b", "c"))
    assert desk.shards() == [both]
    desk.commit(replace(desk.core.history.genesis, disks=(b"a" * 16, b"b" * 16)))
    assert desk.shards() == [both], "it knew of the founders"
    desk.commit(MembershipBody("c", "contributor"))
    desk.commit(LeaderBody("b"))
    assert desk.shards() == [both, three]
    desk.commit(MembershipBody("a", "former"))
    assert desk.shards() == [both, three], "one that was removed keeps what it had"


async def test_a_learner_whose_rows_nobody_would_merge_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch)
    await desk.welcome()
    desk.commit(replace(desk.core.history.genesis, disks=(b"a" * 16, b"b" * 16)))
    shard = region_shards("run", "b", ("a", "b"))[0]
    contribution = Contribution("a", 1, 0, 0, 1, 0, 5, 50, (1.0,), (0, shard, 0, 4))
    desk.reception.on_message(SnapshotReady(contribution))
    assert desk.refusals == [
        f"its place in the data can't be: a trains shard {shard} of the data, which is b's. Its next start goes on "
        "where the run is"
    ]


async def test_a_learner_with_the_number_of_an_earlier_life_is_refused_when_the_ledger_names_a_later_life(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its folder is an older copy that its own ledger names: it trained for weeks, and nothing was merged."""
    desk = Desk(monkeypatch)
    await desk.welcome()
    desk.newest = 2
    desk.commit(LeaderBody("b"))
    assert desk.refusals == [], "a merge of its own"
    desk.newest = 3
    desk.commit(LeaderBody("b"))
    text = "incarnation 2 of this learner was over when 3 began. Its next start goes on where the run is"
    assert (desk.refusals, desk.alarms) == ([text], [text])


async def test_the_learner_hears_of_settings_that_change_after_its_welcome(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk(monkeypatch)
    await desk.welcome()
    desk.core.history.settings = RunSettings(sync_every=32)
    desk.reception.core_changed()
    desk.reception.core_changed()
    changes = [message for message in desk.said if isinstance(message, SettingsChanged)]
    assert changes == [SettingsChanged(sync_every=32, carry_steps_limit=128)]
    assert changes == [TO_LEARNER.decode(TO_LEARNER.encode(changes[0]))]


async def test_shards_wait_until_the_ledger_on_disk_is_committed_or_an_election_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A daemon that has just started knows the members at its base: those shards may be others' by now."""
    desk = Desk(monkeypatch)
    desk.core.ledger.has_caught_up = False
    await desk.welcome()
    desk.commit(replace(desk.core.history.genesis, disks=(b"a" * 16, b"b" * 16)))
    assert desk.shards() == []
    desk.commit(MembershipBody("c", "contributor"))
    desk.core.ledger.has_caught_up = True
    desk.reception.core_changed()
    assert desk.shards() == [region_shards("run", "a", ("a", "b", "c"))]
    alone = Desk(monkeypatch)
    alone.core.ledger.has_caught_up = False
    await alone.welcome()
    alone.now_ns += reception_module.LACK_NS
    alone.reception.core_changed()
    assert alone.shards() == [region_shards("run", "a", ("a", "b"))], "nobody is there: it trains all the same"


@pytest.mark.parametrize("is_replaying", [True, False])
async def test_a_learner_that_knows_of_more_members_than_its_new_daemon_is_not_refused(
    monkeypatch: pytest.MonkeyPatch, is_replaying: bool
) -> None:
    desk = Desk(monkeypatch)
    desk.core.ledger.has_caught_up = not is_replaying
    await desk.welcome()
    desk.commit(replace(desk.core.history.genesis, disks=(b"a" * 16, b"b" * 16)))
    shard = region_shards("run", "b", ("a", "b"))[0]  # by the change that is not made here it is a's
    ready = SnapshotReady(Contribution("a", 1, 0, 0, 1, 0, 5, 50, (1.0,), (1 - is_replaying, shard, 0, 4)))
    desk.reception.on_message(ready)
    assert (desk.refusals, desk.warned) == ([], [ready]), "the leader is asked"

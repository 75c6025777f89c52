"""lab/demo/scripted_members.py: an order goes to the leader until the ledger says that it is done."""

from pathlib import Path
from typing import Any

import pytest

from diloco_node.errors import ConfigError, DilocoError
from diloco_node.lab.chaos.fault_plan import FaultTarget, PlannedFault
from diloco_node.lab.demo import scripted_members as module
from diloco_node.lab.demo.keeping import RegionKeeper
from diloco_node.lab.demo.region_processes import RegionProcess
from diloco_node.lab.demo.scripted_members import ScriptedMembers


class Run:
    """Three regions without a process; orders that a leader takes are in its list of members, where `agrees`."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.regions = [RegionProcess(name, 0, folder / name) for name in "abc"]
        self.keeper = RegionKeeper(folder, folder / "run.toml", [*self.regions], lambda _: None)
        self.members = ScriptedMembers(folder, self.regions, self.keeper)
        self.kinds = dict.fromkeys("abc", "voter")
        self.refusals: list[DilocoError] = []
        self.agrees = True
        self.orders: list[tuple[str, str, str, bool]] = []
        self.lead("a")
        monkeypatch.setattr(module, "change_members", self._change)
        monkeypatch.setattr(module, "order", self._drain)
        monkeypatch.setattr(module, "POLL_S", 0.001)
        monkeypatch.setattr(module, "ORDER_S", 0.2)

    def lead(self, leader: str, changes: int = 0) -> None:
        rows = [{"region": name, "kind": kind} for name, kind in self.kinds.items()]
        for region in self.regions:
            region.status = {"leader": leader, "members": {"changes": changes, "rows": rows}}

    def _change(self, folder: Path, name: str, kind: str, key: Path, *, is_forced: bool, address: Any) -> tuple[str]:
        self.orders.append((folder.name, name, kind, is_forced))
        if self.refusals:
            raise self.refusals.pop()
        if self.agrees:
            self.kinds[name] = kind
            self.lead(folder.name, 1)
        return ("a",)

    def _drain(self, folder: Path, path: str, document: object) -> None:
        self.orders.append((folder.name, path, "", False))
        self.keeper.end_reasons[folder.name] = ""

    async def give(self, kind: str, name: str) -> str:
        return await self.members.carry_out(PlannedFault(0, kind, FaultTarget(name)))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch)


async def test_an_order_is_given_to_the_leader_until_it_is_taken(run: Run) -> None:
    run.refusals = [ConfigError("a change is open")]
    assert await run.give("demote", "b") == ""
    assert run.orders == [("a", "b", "contributor", True)] * 2
    assert await run.give("promote", "b") == ""
    assert run.orders[2:] == [("a", "b", "voter", False)], "a vote is given without force"
    assert await run.give("promote", "b") == ""
    assert len(run.orders) == 3, "what is so needs no order"


async def test_a_region_whose_join_was_refused_can_not_leave(run: Run) -> None:
    assert await run.give("leave", "d") == "it is not there"
    assert run.orders == []


async def test_why_an_order_was_not_done_is_told(run: Run) -> None:
    run.refusals = [ConfigError("its disk does not hold it")] * 1000
    assert await run.give("demote", "c") == "its disk does not hold it"
    run.refusals, run.agrees = [], False
    assert await run.give("demote", "c") == "the order was taken, and no majority agreed"
    for region in run.regions:
        region.status["leader"] = ""
    assert await run.give("demote", "c") == "no region names a leader"


async def test_a_region_leaves_after_it_has_drained(run: Run) -> None:
    assert await run.give("leave", "b") == ""
    assert run.orders == [("b", "drain", "", False), ("a", "b", "former", True)]
    assert [region.name for region in run.regions] == ["a", "c"]
    assert "b" in run.keeper.leaving


async def test_a_folder_that_is_not_put_aside_is_told(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.keeper._save()
    assert await run.give("wipe", "c") == "nothing of it ran within 0 s"

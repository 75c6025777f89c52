"""Faults to plant into changes of the members; see `core_faults`."""

from typing import Any

from diloco_node.core.ledger.disks import DiskView
from diloco_node.core.ledger.roster import Roster, majority_of
from diloco_node.core.member_kind import MemberKind, MembershipBody
from diloco_node.core.operator_orders import EntryOrdered
from diloco_node.lab.sim.planting import Fault


class EagerView(DiskView):
    """Counts every member as a voter."""

    @property
    def roster(self) -> Roster:
        """The roster, in which all vote."""
        return self._roster

    @roster.setter
    def roster(self, roster: Roster) -> None:
        self._roster = Roster(roster.lines, roster.changes, roster.signature)
        self._roster.voters = roster.names


def count_contributors(core: Any) -> None:
    """Let a core count the votes of all members."""
    disks = core.ledger.disks
    before = disks.__dict__.pop("roster")
    disks.__class__ = EagerView
    disks.roster = before


def _forget_open_change(core: Any) -> None:
    """An order is carried out while another change is not committed yet."""
    replacement, ledger = core.replacement, core.ledger
    fault = replacement.order_fault

    def fault_without(order: EntryOrdered, **more: Any) -> str:
        text: str = fault(order, **more)
        is_open = text.startswith("another change of the regions") and isinstance(order.body, MembershipBody)
        return ledger.disks.roster.change_fault(order.body) if is_open else text

    replacement.order_fault = fault_without


def _count_by_the_old_list(core: Any) -> None:
    """As if a list that grew needed no more votes than before: two of four, which are all of the new ones."""
    ledger = core.ledger
    election: Any = ledger._election
    missing = election.missing_votes

    def spared() -> int:
        voters = len(ledger.disks.roster.voters)
        has_grown = ledger.disks.roster.changes > 0 and voters > 1
        return majority_of(voters) - majority_of(voters - 1) if has_grown else 0

    def agreed_index() -> int:
        durable = {peer: (follower.disk, follower.durable_index) for peer, follower in ledger._followers.items()}
        durable[core._region] = (ledger._disk, ledger._log.durable_index)
        voters = ledger.disks.roster.voters
        indexes = [durable[name][1] if ledger._counts(name, durable[name][0]) else 0 for name in voters]
        return sorted(indexes, reverse=True)[majority_of(len(voters)) - 1 - spared()]

    agree = ledger._agreed_index
    election.missing_votes = lambda: missing() - spared()
    ledger._agreed_index = lambda: agreed_index() if spared() else agree()


def _has_joined(core: Any) -> bool:
    """Whether its region did not found the run."""
    return core.ledger.disks._founders.kind_of(core._region) is MemberKind.FORMER


def _lead_after_removal(core: Any) -> None:
    """A leader removes itself and goes on, and the others go on to follow it."""
    replacement, ledger = core.replacement, core.ledger
    fault = replacement.order_fault

    def fault_without(order: EntryOrdered, **more: Any) -> str:
        text: str = fault(order, **more)
        is_own = order.body.region == core._region and isinstance(order.body, MembershipBody)
        return "" if is_own and " leads: asked itself" in text and ledger.is_settled else text

    replacement.order_fault = fault_without
    ledger._may_lead = lambda peer: ledger.disks.roster.has_removed(peer)
    core.farewell.look = lambda *, now_ns: None


def _acknowledge_as_joiner(core: Any) -> None:
    """Who joins acknowledges entries whose payloads and states it has not."""
    ledger = core.ledger
    if _has_joined(core):
        ledger._may_persist = lambda entry: True
        log: Any = ledger._log
        log._has_base = lambda: True


MEMBER_FAULTS = (
    Fault(
        "eager-vote",
        "a member's vote counts once an entry has given it",
        spoil=count_contributors,
    ),
    Fault(
        "open-changes",
        "one change of the members is open at a time",
        spoil=_forget_open_change,
    ),
    Fault(
        "old-majority",
        "a majority is one of the list that the log names, which has grown",
        spoil=_count_by_the_old_list,
    ),
    Fault(
        "removed-leader",
        "who was removed leads no longer",
        spoil=_lead_after_removal,
    ),
    Fault(
        "joiner-boasts",
        "a joiner acknowledges what its disk holds",
        spoil=_acknowledge_as_joiner,
    ),
)

"""The arithmetic of a change of the members: what it would leave, and whether that can and should be. Pure.

`Roster.change_fault` is about the ledger alone, and every region asks it. The questions here are the leader's, and
depend on who is there now.
"""

from __future__ import annotations

from collections.abc import Container

from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.ledger.roster import NO_DISK, Roster, majority_of
from diloco_node.core.member_kind import MemberKind, MembershipBody
from diloco_node.core.types import EVICTED, EXPELLED


def order_fault(
    body: MembershipBody, roster: Roster, *, leader: str, alive: Container[str], is_forced: bool = False
) -> str:
    """Say why an operator's order can't be carried out now, with its arithmetic; empty if it can.

    alive: the regions that are there, beside the leader.
    is_forced: the operator takes the risk that the next failure stops merging; not that this change does.
    """
    region = body.region
    if fault := roster.change_fault(body) or (roster.loss_fault(region) if region == roster.witness else ""):
        return fault
    before = roster.voters
    after = [name for name in before if name != region] + [region] * (body.kind == MemberKind.VOTER)
    if set(after) == set(before):
        return ""
    if region == leader:
        return f"{region} leads: asked itself, it hands over; give the order to the region that leads then"
    there = [name for name in after if name == leader or name in alive]
    quorum = majority_of(len(after))
    if len(there) < quorum:
        names = ", ".join(sorted(there))
        return f"it makes {len(after)} voters, of which {quorum} must be there, and only {names} would be"
    is_riskier = len(after) < len(before) and region in alive and len(there) == quorum
    if not is_riskier or is_forced:
        return ""
    silent = [name for name in before if name != leader and name not in alive]
    state = f"{len(before)} voters, {'of which ' + ', '.join(silent) + ' silent' if silent else 'all are there'}"
    verb = "removing" if body.kind == MemberKind.FORMER else "taking the vote of"
    return f"{state}: {verb} {region} leaves {len(after)}, and the next failure stops merging; --force takes that risk"


def leader_fault(ledger: LedgerCore) -> str:
    """Say why this region can't put an order into the ledger, with the remedy; empty if it can."""
    if ledger.is_settled:
        return ""
    if ledger.is_leader:
        return "it has just begun to lead: give the order again in some seconds"
    if ledger.leader:
        return f"only the leader can do it: give the order to {ledger.leader}"
    return (
        "no region leads now: give the order again once a majority of the voters is there, which `diloco-node members "
        "list` counts. If one is lost for good, `diloco-node members recover`"
    )


def tolerance(roster: Roster, there: Container[str]) -> str:
    """Say how many voters may be away while the run goes on merging. there: the regions that are there."""
    voters, quorum = roster.voters, majority_of(len(roster.voters))
    away = [name for name in voters if name not in there or roster.disks[name] in (NO_DISK, EXPELLED)]
    spare = len(voters) - len(away) - quorum
    missing = f"; no vote comes from {', '.join(away)}" if away else ""
    state = f"{len(voters)} voters, {quorum} must be there{missing}"
    names = ", ".join(name for name, disk in roster.disks.items() if disk == EVICTED)
    remark = f"; {names} was away too long" if names else ""
    if spare > 0:
        return f"{state}: merging goes on with {spare} {'more ' if away else ''}of them away{remark}"
    need = f"merging waits for {-spare} of them" if spare else "the next failure stops merging"
    return f"{state}: {need}{remark}"

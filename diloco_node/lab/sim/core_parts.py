"""Facts of a region core that checkers ask and cheats change, and which it shows nobody else."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from diloco_node.core.recovery.fetches import Fetches
    from diloco_node.core.types import EntryBody
    from diloco_node.lab.sim.host import Host


def newest_leader(hosts: Iterable[Host]) -> Host | None:
    """The one with the highest term of those that lead, as far as they know."""
    return max((host for host in hosts if host.is_leading), key=lambda host: host.core.ledger.term, default=None)


def log_end(core: Any) -> tuple[int, int]:
    """Term and index of the last entry of its log."""
    log = core.ledger._log
    return log.last_term, log.last_index


def counted_end(core: Any) -> tuple[int, int]:
    """The same, as far as it counts in an election: not from an entry on that takes the own vote, and is not committed
    here (`LedgerState._is_up_to_date`)."""
    log, disks = core.ledger._log, core.ledger.disks
    if core.ledger._region in disks.roster.voters or disks.last_change_index <= core.ledger.cluster_commit_index:
        return log_end(core)
    return log.term_at(disks.last_change_index - 1), disks.last_change_index - 1


def unasked(core: Any) -> tuple[int, ...]:
    """Fragments whose fetch nobody is asked for, while no fetch is under way and somebody could help."""
    fetches: Fetches = core._fetches
    waiting = fetches.pending.items() if fetches.pending and not fetches.in_flight() else ()
    return tuple(fragment for fragment, fetch in waiting if fetches._alive - fetch.gone)


def spoil_proposals(core: Any, spoil: Callable[[EntryBody], EntryBody]) -> None:
    """Let it propose other entries than it decided on, and check nothing itself."""
    ledger_core, gate = core.ledger, core.ledger._entry_gate
    propose, seal = ledger_core.propose, gate.sealed

    def without_question(owner: Any, question: str, answer: Any, call: Callable[[], Any]) -> Any:
        before = getattr(owner, question)
        setattr(owner, question, answer)
        try:
            return call()
        finally:
            setattr(owner, question, before)

    def propose_another(body: EntryBody, *, now_ns: int) -> Any:
        return without_question(
            ledger_core, "_has_payload", lambda _: True, lambda: propose(spoil(body), now_ns=now_ns)
        )

    def seal_anything(body: EntryBody, **where: Any) -> Any:
        return without_question(gate, "_fault_after", lambda *_: "", lambda: seal(body, **where))

    ledger_core.propose, gate.sealed = propose_another, seal_anything

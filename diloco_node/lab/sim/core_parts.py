"""Where the parts of a region core are that checkers ask and planted faults replace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from diloco_node.core.ledger.raft import LedgerCore
    from diloco_node.core.recovery.fetches import Fetches
    from diloco_node.core.rounds.leader import RoundLeader
    from diloco_node.core.rounds.participant import RoundParticipant
    from diloco_node.core.types import EntryBody


def ledger(core: Any) -> LedgerCore:
    """The ledger inside a region core."""
    ledger_core: LedgerCore = core.ledger
    return ledger_core


def region(core: Any) -> str:
    """The region that it decides for."""
    name: str = core._region
    return name


def log_end(core: Any) -> tuple[int, int]:
    """Term and index of the last entry of its log."""
    log = ledger(core)._log
    return log.last_term, log.last_index


def merged_incarnation(core: Any, learner: str) -> int:
    """The newest incarnation of the learner in its ledger; -1 if there is none."""
    incarnation: int = core.history.account.newest_incarnation(learner)
    return incarnation


def rounds(core: Any) -> RoundLeader:
    """The part of a core that decides about rounds while it leads."""
    leader: RoundLeader = core.leader
    return leader


def unasked(core: Any) -> tuple[int, ...]:
    """Fragments whose fetch nobody is asked for, while no fetch is under way and somebody could help."""
    fetches: Fetches = core._fetches
    waiting = fetches.pending.items() if fetches.pending and not fetches.in_flight() else ()
    return tuple(fragment for fragment, fetch in waiting if fetches._alive - fetch.gone)


def participant(core: Any) -> RoundParticipant:
    """Its part in rounds that others lead."""
    member: RoundParticipant = core.participant
    return member


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

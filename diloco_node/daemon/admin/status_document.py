"""The status document, the notes in it, and the report that a region leaves behind."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from diloco_node.core.events import Note
from diloco_node.core.view import PeerView, RegionView, RoundView
from diloco_node.daemon.curve_marks import letter_of
from diloco_node.daemon.learner.proxy import LearnerProxy
from diloco_node.daemon.logs import part_of
from diloco_node.daemon.repeats import Repeats, numberless
from diloco_node.daemon.run_record import REPORT_NAME
from diloco_node.escaping import escaped, escaped_document
from diloco_node.storage.durable import replace_file
from diloco_node.transport.kernel.wire_meter import PeerTraffic
from diloco_node.transport.link_status import PeerStatus

if TYPE_CHECKING:  # which has one of each
    from diloco_node.daemon.node import Node

NOTES_SHOWN_MAX: Final = 64

log = structlog.get_logger()


class NoteBook:
    """Decisions with their reasons: each goes to the log, the last ones to the status.

    A peer can cause notes as fast as it can send. So one of the same cause as another within some seconds is counted
    and not repeated (`Repeats`), and one kind never pushes the last ones of another kind out of the status.

    Attributes:
        last: as the status shows them, `count` with each: how often it came. alarms: how many there were.
        marks: the last ones on the curves, (monotonic ns, letter).
    """

    def __init__(
        self, region: str, now_ns: Callable[[], int], on_alarm: Callable[[str], None] = lambda text: None
    ) -> None:
        self.last: list[dict[str, Any]] = []
        self.alarms = 0
        self.marks: deque[tuple[int, str]] = deque(maxlen=NOTES_SHOWN_MAX)
        self._region = region
        self._now_ns = now_ns
        self._on_alarm = on_alarm
        self._repeats = Repeats(now_ns)
        self._recent: dict[Hashable, dict[str, Any]] = {}

    def add(self, note: Note) -> None:
        """Take one."""
        self.alarms += note.is_alarm
        for kind, count in self._repeats.end_window():
            log.info("held back", region=self._region, part=part_of(kind), kind=kind, count=count)
            self._recent.clear()
        text = escaped(note.text)
        cause = _cause(note, text)
        if not self._repeats.is_new(note.kind, cause):
            if (row := self._recent.get((note.kind, cause))) is not None:
                row["count"] += 1
            return
        write = log.warning if note.is_alarm else log.info
        where = {} if note.fragment < 0 else {"fragment": note.fragment, "version": note.version}
        if note.is_alarm:
            self._on_alarm(text)
        write(note.kind, region=self._region, part=part_of(note.kind), **where, reason=text)
        row = {"at_ns": self._now_ns(), **dataclasses.asdict(note), "text": text, "count": 1}
        if letter := letter_of(note):
            self.marks.append((row["at_ns"], letter))
        self._recent[note.kind, cause] = row
        self.last.append(row)
        if len(self.last) > NOTES_SHOWN_MAX:
            self._drop_one()

    def _drop_one(self) -> None:
        """The oldest of the kind that has the most."""
        kinds = Counter(note["kind"] for note in self.last)
        kind_most = max(kinds, key=lambda kind: kinds[kind])
        oldest = self.last.pop(next(index for index, note in enumerate(self.last) if note["kind"] == kind_most))
        self._recent = {cause: note for cause, note in self._recent.items() if note is not oldest}


def _cause(note: Note, text: str) -> Hashable:
    """Equal for notes that need be told once. Notes on a round are told each time, unless the text is the same."""
    if note.is_alarm or note.fragment < 0:
        return note.fragment, numberless(text)
    return note.fragment, note.version, text


def model_digest(digests: Iterable[bytes]) -> str:
    """The digest (hex) of a whole model: SHA-256 over the fragments' digests in order."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def write_report(state_dir: Path, report: Mapping[str, Any]) -> None:
    """Leave report.json; durable when this returns. Raises StorageError."""
    replace_file(state_dir / REPORT_NAME, [(json.dumps(report, indent=1) + "\n").encode()])


def region_status(node: Node, view: RegionView, state: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """The status document: plain values only, ready for JSON, all texts fit to be shown."""
    learner, transport, notes, now_ns = node.learner, node.transport, node.runtime.notes, node.runtime.now_ns()
    traffic, links = transport.traffic(), transport.peer_status()
    ratios = dict(view.participation)
    facts = learner.facts
    digests = [digest for version, digest in view.digests]
    is_hashed = all(
        version == version_now for (version, _), version_now in zip(view.digests, view.versions, strict=True)
    )
    document: dict[str, Any] = {
        "region": view.region,
        "run_id": node.runtime.spec.run_id,
        "state": state,
        "role": view.role,
        "leader": view.leader,
        "term": view.term,
        "commit_index": view.commit_index,
        "applied_index": view.applied_index,
        "last_index": view.last_index,
        "reason": _headline(view),
        "end": {"reason": view.finished, "is_written": view.is_final} if view.finished else None,
        "versions": list(view.versions),
        "digest": model_digest(digests) if is_hashed else None,
        "rounds_committed": view.rounds_committed,
        "tokens_merged": view.tokens_merged,
        "participation": ratios.get(view.region),
        "participation_of": ratios,
        "left_out": [dataclasses.asdict(suspect) for suspect in view.left_out],
        "rounds": [_round(round_, now_ns) for round_ in view.rounds],
        "peers": [_peer(peer, links[peer.region], traffic[peer.region]) for peer in view.peers if peer.region in links],
        "fetching": [{"fragment": f, "version": v, "peer": p} for f, v, p in view.fetching],
        "budget": transport.budget_status(),
        "wire_bytes_out": sum(meter.bytes_out for meter in traffic.values()),
        "wire_bytes_in": sum(meter.bytes_in for meter in traffic.values()),
        "learner": _learner(learner, now_ns),
        # (fragment, version, monotonic ns) of the last versions that the learner could read.
        "offers": [list(offer) for offer in learner.version_area.offered_at_ns],
        # Of the last learner that was attached, also when it is gone.
        "inner_steps": learner.steps_total,
        "tokens": learner.tokens_total,
        "loss_first": facts.loss_first,
        "loss_last": facts.loss_last,
        "val_loss": facts.val_loss,
        "val_loss_global": facts.val_loss_global,
        "learner_blocked_seconds": facts.blocked_ns / 1e9,
        "digest_differences": view.digest_differences,
        "ledger_contradictions": [{"region": peer, "reason": reason} for peer, reason in view.contradictions],
        "wrong_leaders": [{"region": peer, "reason": reason} for peer, reason in view.wrong_leaders],
        "overbooked": view.overbooked,
        "alarms": notes.alarms,
        "rejections": [
            {"peer": peer, "reason": reason, "count": count}
            for (peer, reason), count in sorted(transport.rejections.items())
        ],
        "quarantine": {peer: why for peer in links if (why := transport.quarantine_reason(peer))},
        "marks": [list(mark) for mark in notes.marks],
        **extra,
    }
    # Reasons and errors are in part the words of peers. Notes and rounds were escaped when they were made.
    own_rows = {"notes": [dict(note) for note in notes.last], "round_log": node.facts.rounds.rows()}
    return {**escaped_document(document), **own_rows}


def _headline(view: RegionView) -> str:
    """The line that says what this region is doing or waiting for."""
    if view.finished:
        return f"finished: {view.finished}" + ("" if view.is_final else "; the final model is not on disk yet")
    if view.rounds:
        first = view.rounds[0]
        round_ = f"fragment {first.fragment} to {first.version}: {first.waiting}"
        return f"{view.end_waits}; {round_}" if view.end_waits else round_  # rounds are open nearly always
    return view.waiting


def _round(round_: RoundView, now_ns: int) -> dict[str, Any]:
    return {
        "fragment": round_.fragment,
        "version": round_.version,
        "ballot": str(round_.ballot),
        "attempt": round_.attempt,
        "members": list(round_.members),
        "reducers": list(round_.reducers),
        "open_seconds": (now_ns - round_.opened_at_ns) / 1e9 if round_.opened_at_ns else None,
        "reason": round_.waiting,
    }


def _peer(peer: PeerView, link: PeerStatus, traffic: PeerTraffic) -> dict[str, Any]:
    return {
        "name": peer.region,
        "link": link.state.value,
        "address": link.address,
        "error": link.error,
        "bulk_connections": link.connections,
        "certificate": None
        if link.certificate is None
        else {
            "fingerprint": link.certificate.fingerprint.hex(),
            "expires_unix": link.certificate.not_after.timestamp(),
            "has_newest_of_ours": link.is_renewed,
        },
        "is_alive": peer.is_alive,
        "has_left": peer.has_left,
        "rtt_seconds": peer.rtt_ns / 1e9 if peer.rtt_ns else None,
        "hears": list(peer.hears),
        "step": peer.learner.step if peer.learner is not None else None,
        "versions": None if peer.learner is None else [position.base_version for position in peer.learner.positions],
        "applied_index": peer.applied_index,
        "wire_bytes_out": traffic.bytes_out,
        "wire_bytes_in": traffic.bytes_in,
        "is_measured": traffic.is_measured,
    }


def _learner(learner: LearnerProxy, now_ns: int) -> dict[str, Any] | None:
    status, facts = learner.shown_status, learner.facts
    if status is None:
        return None
    seconds = (facts.last_report_ns - facts.first_report_ns) / 1e9
    tokens = status.tokens - facts.tokens_at_first_report
    place, pause = learner.place, learner.pause
    return {
        "incarnation": status.incarnation,
        "step": status.step,
        "attached_step": facts.attached_step,
        "tokens": status.tokens,
        "step_seconds": status.step_time_ns / 1e9,
        "tokens_per_second": tokens / seconds if seconds > 0 else None,
        "current_tokens_per_second": facts.tokens.per_second(now_ns=now_ns),
        "loss": facts.loss_last,
        "val_loss": facts.val_loss,
        "val_loss_step": facts.val_loss_step,
        "val_loss_global": facts.val_loss_global,
        "val_loss_global_step": facts.val_loss_global_step,
        "blocked_seconds": facts.blocked_ns / 1e9,
        "report_age_seconds": (now_ns - facts.last_report_ns) / 1e9 if facts.last_report_ns else None,
        "pause_age_seconds": (now_ns - facts.resumed_ns) / 1e9 if facts.resumed_ns else None,
        "first_step_wait_seconds": (now_ns - facts.ready_ns) / 1e9 if facts.ready_ns else None,
        "busy": None if pause is None else {"activity": pause.activity, "since_seconds": now_ns / 1e9 - pause.since_s},
        "at_stake": None if place is None else place.losses,
        "discounted_versions": facts.discounted_versions,
        "warnings": facts.warnings,
        "finished": status.finished,
        "leaving": status.leaving,
        "positions": [dataclasses.asdict(position) for position in status.positions],
    }

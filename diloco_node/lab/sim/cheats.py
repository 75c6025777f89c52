"""Regions that do wrong in right words: an attacker's reducer or leader, a script with a mistake in it, an old folder.

A change by `Liar` shows as soon as somebody compares. A cheat is consistent: messages, digests and norms belong to the
wrong thing that its region did. It is one region's, and goes on until it is ended.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from diloco_node.core.messages import ContributionProjected, MergedReceived
from diloco_node.core.projections import Projected
from diloco_node.core.types import DiscardedBody, EntryBody, RoundBody, SnapshotBody
from diloco_node.lab.sim import core_parts as view
from diloco_node.lab.sim.fake_store import FolderDisk
from diloco_node.lab.sim.host import Host
from diloco_node.lab.sim.world import SECOND
from diloco_node.numeric import F32
from diloco_node.wire.envelope import decode_control, encode_control

OLD_FOLDER = "old folder"
OLD_AFTER_NS = 8 * SECOND
"""An older copy of a folder is so old when it comes back."""


@dataclass(frozen=True, slots=True)
class Cheat:
    """A kind of wrong that one region does.

    Attributes:
        name: for reports and commands. begin: lets a region do it; called before its first daemon.
        words: of alarms, by one of which honest regions name it.
        commits_wrong: an audit finds its sums after some rounds, until which they may commit.
    """

    name: str
    begin: Callable[[Host], None]
    words: tuple[str, ...] = ()
    commits_wrong: bool = False


class Cheating:
    """A region that does it.

    Attributes:
        region: which one. lies: for reports.
        has_forged: its log may hold what nobody decided, so it is not made honest.
    """

    def __init__(self, host: Host, cheat: Cheat) -> None:
        self.region, self.cheat, self.has_forged = host.name, cheat, True
        self.lies: dict[str, int] = {}
        self._host = host
        cheat.begin(host)

    def end(self) -> None:
        """Its next daemon and learner are honest."""
        self._host.spoil_sum, self._host.token_factor, self._host.spoil_core = None, 1, None
        self._host.network.frame_spoilers.pop(self.region, None)


def _sum_wrongly(spoil: Callable[[F32], F32], host: Host) -> None:
    host.spoil_sum = spoil


def _bias(values: F32) -> F32:
    return values + np.float32(1e-2)


def _count_more(factor: int, host: Host) -> None:
    host.token_factor = factor


def _lead_wrongly(change: Callable[[RoundBody], dict[str, Any]], host: Host) -> None:
    def spoil(body: EntryBody) -> EntryBody:
        return replace(body, **change(body)) if isinstance(body, RoundBody) else body

    host.spoil_core = partial(view.spoil_proposals, spoil=spoil)


def _weigh_the_first(body: RoundBody) -> dict[str, Any]:
    first, *members = body.members
    return {"members": (replace(first, weight=64.0 * first.weight), *members)}


def _throw_away(host: Host) -> None:
    """In place of each round it books steps as lost that another region has never made."""

    def spoil(body: EntryBody) -> EntryBody:
        members = body.members if isinstance(body, RoundBody) else ()
        work = next((member.contribution for member in members if member.contribution.learner != host.name), None)
        if work is None:
            return body
        steps = (work.step_from, work.step_to + (1 << 20), work.tokens)
        return DiscardedBody(work.learner, work.incarnation, work.fragment, *steps, "it pleases me")

    host.spoil_core = partial(view.spoil_proposals, spoil=spoil)


def _name_other_states(host: Host) -> None:
    """It names states that no region has, for the others to take from it."""

    def spoil(body: EntryBody) -> EntryBody:
        return replace(body, digest=bytes([7]) * 32) if isinstance(body, SnapshotBody) else body

    host.spoil_core = partial(view.spoil_proposals, spoil=spoil)


def _end_early(host: Host) -> None:
    """Whenever it leads, it holds the last rounds, as if an operator had asked for the end."""

    def spoil(core: Any) -> None:
        leader: Any = core.leader
        begin = leader.begin

        def begin_last(*facts: Any, **more: Any) -> None:
            begin(*facts, **more)
            leader.request_finish("enough")

        leader.begin = begin_last
        core.end.doubt = lambda body, *, now_ns: ""

    host.spoil_core = spoil


def _avoid_audits(host: Host) -> None:
    """Its sums are wrong, and as leader it gives up each ballot that is to be audited."""
    host.spoil_sum = np.negative

    def spoil(core: Any) -> None:
        leader: Any = core.leader
        propose = leader._propose_audited

        def propose_others(round_: Any, now_ns: int) -> None:
            if round_.windows:
                leader._next_ballot(round_, "it would be audited", now_ns=now_ns)
            else:
                propose(round_, now_ns)

        leader._propose_audited = propose_others

    host.spoil_core = spoil


def _deny_receipts(host: Host) -> None:
    """Each merged stripe that it gets has other bytes, it says."""

    def tell(_: str, frame: bytes) -> bytes:
        message = decode_control(frame)
        if type(message) is not MergedReceived:
            return frame
        return encode_control(replace(message, digests=(bytes([1]) * 32,) * len(message.digests)))

    host.network.frame_spoilers[host.name] = tell


def _project(change: Callable[[tuple[float, ...]], tuple[float, ...]], host: Host) -> None:
    """It tells other projections of its contributions."""

    def tell(_: str, frame: bytes) -> bytes:
        message = decode_control(frame)
        if type(message) is not ContributionProjected:
            return frame
        return encode_control(replace(message, projections=change(message.projections)))

    host.network.frame_spoilers[host.name] = tell


def _turned(projections: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(-value for value in projections)


def _hide(host: Host) -> None:
    """Its sums are wrong, and it tells no projections of its contributions, without which no sum can be checked."""
    host.spoil_sum = np.negative
    _project(lambda _: (), host)


def _excuse(host: Host) -> None:
    """Its sums are wrong, and by its own projections its contribution is what they differ by."""
    host.spoil_sum = np.negative

    def spoil(core: Any) -> None:
        audits = core.participant.audits
        tell_truth = audits.projected

        def tell(event: Projected) -> None:
            projection, ballot = event.projection, getattr(audits._round_of(event.ballot), "ballot", None)
            if ballot and ballot.decision and projection.sums and projection.contribution:
                announcement, decision = ballot.announcement, ballot.decision
                windows = audits._windows(announcement.fragment, ballot.nonces, announcement.stripes)
                names = [contribution.learner for contribution in decision.contributions]
                factors = decision.coefficients[names.index(host.name)] if host.name in names else ()
                row = [
                    value + 2 * total / factors[window.piece]
                    if window.reducer == host.name and factors and factors[window.piece]
                    else value
                    for value, total, window in zip(projection.contribution, projection.sums, windows, strict=True)
                ]
                event = replace(event, projection=replace(projection, contribution=tuple(row)))
            tell_truth(event)

        audits.projected = tell

    host.spoil_core = spoil


def older_copy(host: Host) -> Any:
    """Return a copy of a region's folder as it is now."""
    older = copy.copy(host.disk)
    for name in ("entries", "payloads", "states", "older_states"):
        setattr(older, name, copy.copy(getattr(host.disk, name)))
    return older


def put_back(host: Host, older: Any) -> None:
    """Start a region again with an older copy of its folder: what was acknowledged meanwhile is gone."""
    host.kill_daemon()
    host.kill_learner()
    older.ledger_queue, older.late_writes, older.votes = [], [], host.disk.votes
    if isinstance(older, FolderDisk):
        older.is_full, older.fsync_failures = False, 0
    # A learner that gets a number again ends as soon as it takes a version, and the next one gets another number.
    older.counters = host.disk.counters
    host.disk = older
    host.start()


def _bring_back_old_folder(host: Host) -> None:
    def take() -> None:
        host.world.after(OLD_AFTER_NS, None, bring, older_copy(host))

    def bring(older: Any) -> None:
        peers = [peer for peer in host.observer.hosts.values() if peer is not host and not peer.is_absent]
        ends = host.disk.entries[-1:]
        # One that lacks what this folder forgets, and knows nothing of its age, would be a majority with it.
        if host.core is None or not all(peer.core is not None and all(map(peer.disk.holds, ends)) for peer in peers):
            host.world.after(SECOND // 4, None, bring, older)
        else:
            put_back(host, older)

    host.world.after(OLD_AFTER_NS, None, take)


_SUM_WORDS = ("its merged stripe", "its sum")

CHEATS: dict[str, Cheat] = {
    cheat.name: cheat
    for cheat in (
        Cheat("sum x1000", partial(_sum_wrongly, lambda values: values * np.float32(1000)), _SUM_WORDS),
        Cheat(
            "sum x1.5", partial(_sum_wrongly, lambda values: values * np.float32(1.5)), _SUM_WORDS, commits_wrong=True
        ),
        Cheat("sum flipped", partial(_sum_wrongly, np.negative), _SUM_WORDS, commits_wrong=True),
        Cheat("sum biased", partial(_sum_wrongly, _bias), _SUM_WORDS, commits_wrong=True),
        Cheat("audits avoided", _avoid_audits, (*_SUM_WORDS, "it avoids audits"), commits_wrong=True),
        Cheat("projections", partial(_project, _turned), ("other projections",)),
        Cheat("sum excused", _excuse, (*_SUM_WORDS, "other projections"), commits_wrong=True),
        Cheat("no projections", _hide, _SUM_WORDS, commits_wrong=True),
        Cheat("tokens x2", partial(_count_more, 2)),
        Cheat("tokens x8", partial(_count_more, 8)),
        Cheat("tokens x64", partial(_count_more, 64)),
        Cheat("factors", partial(_lead_wrongly, lambda body: {"factors": (0.0,) * len(body.factors)}), ("its factor",)),
        Cheat("share", partial(_lead_wrongly, lambda _: {"share": 2.0**-126}), ("its share",)),
        Cheat("weights", partial(_lead_wrongly, _weigh_the_first), ("its weight",)),
        Cheat(
            "rows left out",
            partial(_lead_wrongly, lambda _: {"projections": ()}),
            ("lack the nonce", "it lacks the projections"),
        ),
        Cheat("discards", _throw_away, ("has not given up",)),
        Cheat("states", _name_other_states, ("told another state",)),
        Cheat("early end", _end_early, ("no operator's order",)),
        Cheat("receipts", _deny_receipts),
        Cheat(OLD_FOLDER, _bring_back_old_folder, ("is an older copy",)),
    )
}

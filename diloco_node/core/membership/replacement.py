"""A region whose folder was lost comes back with another one: the leader has the ledger name it, in two entries.

A voter that nobody hears for long loses its vote by an entry (`absence`), and gets it back as a new folder is named.

An operator's order expels a region with one entry, and readmits it with another one, after which its folder is named.
Another order revokes a certificate of a region, a third kind changes the members (`member_change`), and a fourth the
settings (`SettingsChange`). A region leaves once no open round has it: until then no new round does, and no other
change of the members is taken, for it is signed as the next one. So a round never has a member that the ledger does not
name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from diloco_node.core.bounds import REVOKED
from diloco_node.core.events import Effect
from diloco_node.core.ledger.disks import expulsion_fault
from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.member_kind import MemberKind, MembershipBody
from diloco_node.core.membership import member_change
from diloco_node.core.operator_orders import EntryOrdered
from diloco_node.core.rounds.claim_limits import is_plausible_incarnation
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.extension import WAY_ON, lasting_end
from diloco_node.core.rounds.leader import RoundLeader
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.types import EVICTED, EXPELLED, DiskNamedBody, FolderLife, RevokedBody

REST_HEARTBEATS: Final = 50
"""After a region's folder was named, the next change of the same region waits for so long: 10 s by default. A folder is
lost once in years; a region that tells another id each time must not fill the ledger."""

LIVES_UNKNOWN_MAX: Final = 1000
"""Lives that a learner may have had in one folder without an entry that names any of them."""

FOLDERS_UNKNOWN_MAX: Final = 1000
"""Folders in a row, of one region, of whose learners no entry names any. Times the lives of each it is a number that
`is_plausible_incarnation` still takes."""

HOLD_NS: Final = 60_000_000_000
"""Merges that are decided end with their ballots. So long after the last deadline their entries may wait for a
majority; then an order is dropped, for no merge is decided in the meantime."""

RUN_IS_OVER: Final = f"the run is over: {WAY_ON}"


def next_incarnation(newest: int, newest_here: int, replacements: int) -> int:
    """The number for a new life of a region's learner. newest, newest_here: life that the ledger, and the region's
    folder, know of.

    A folder that was lost may have handed out numbers that no entry names yet, while other regions still hold what
    those lives contributed. So the numbers are dealt to the folders in blocks, in turn: a folder whose next number is
    in another's block goes on in its own next one, unless that is too far from what the others know.
    """
    number = max(newest, newest_here) + 1
    block = number // LIVES_UNKNOWN_MAX
    blocks_ahead = (replacements - block) % FOLDERS_UNKNOWN_MAX
    own = (block + blocks_ahead) * LIVES_UNKNOWN_MAX if blocks_ahead else number
    return own if is_plausible_incarnation(own + LIVES_UNKNOWN_MAX, newest) else number


class SettingsChange:
    """The leader's side of an operator's order of other settings: they come into the ledger between two merges.

    A merge's weights, and the rates of its outer step, follow from the settings at its entry; every region works them
    out again. So from the order on the leader decides no merge. It waits for those that it has decided, which end with
    their ballots, and puts the settings behind them. Merges go on when they are committed.
    """

    def __init__(self, context: RoundContext, ledger: LedgerCore, merges: RoundLeader) -> None:
        self._history, self._effects = context.history, context.effects
        self._ledger, self._merges = ledger, merges
        # Ordered, and not in the ledger yet.
        self._body: SettingsBody | None = None
        # Merges are held for it until then, at most.
        self._limit_ns = 0
        # Of the entry of the last order.
        self._index = 0

    def order_fault(self, body: SettingsBody) -> str:
        """Say why these settings can't be ordered here and now, with the remedy; empty if they can."""
        # An order holds all the settings: it is made of those that the order before has left.
        applied_index = min(self._ledger.cluster_commit_index, self._history.account.index)
        if self._body is not None or self._index > applied_index:
            return "another change of the settings is not committed yet: try again"
        return self._fault(body)

    def _fault(self, body: SettingsBody) -> str:
        if self._history.genesis is None:
            return "the run has not begun: change run.toml in all regions"
        if lasting_end(self._history.finished, self._history.settings) is not None:
            return RUN_IS_OVER
        if self._merges.is_ending:
            return "the run is about to end"
        if fault := member_change.leader_fault(self._ledger):
            return fault
        settings = self._history.settings
        if body == SettingsBody.of(settings):
            return "the run has these settings already"
        return body.fault(len(self._history.roster.names), settings.heartbeat_ns)

    def carry_out(self, body: SettingsBody, *, now_ns: int) -> list[Effect]:
        """Begin to carry out an order, if it still can be; what the ledger wants for it."""
        if fault := self.order_fault(body):
            self._effects.note("settings", f"an operator changes the settings: refused, {fault}", is_alarm=True)
            return []
        deadlines_ns = (round_.deadline_ns for round_ in self._merges.rounds.values() if round_.decision is not None)
        self._body, self._limit_ns = body, HOLD_NS + max(deadlines_ns, default=now_ns)
        return self.advance(now_ns=now_ns)

    def advance(self, *, now_ns: int) -> list[Effect]:
        """Put the settings that wait into the ledger once no merge is in the way; what the ledger wants for it."""
        body = self._body
        if body is None:
            return []
        fault = self._fault(body)
        if not fault and not self._merges.hold_merges(now_ns=now_ns):
            if now_ns < self._limit_ns:
                return []
            fault = "a merge that was decided before is not committed: look at `status`, and order it again"
        self._body = None
        last_index = self._ledger.last_index
        wishes = [] if fault else self._ledger.propose(body, now_ns=now_ns)
        if self._ledger.last_index == last_index:
            self._merges.go_on(now_ns=now_ns)
            self._effects.note("settings", f"the settings stay: {fault or 'the ledger refuses others'}", is_alarm=True)
        self._index = self._ledger.last_index
        return wishes


class DiskReplacement:
    """The leader's side: which change of the view is due. Asked with each heartbeat."""

    def __init__(
        self, context: RoundContext, ledger: LedgerCore, rounds: RoundLeader, roster_fault: Callable[[Roster], str]
    ) -> None:
        # See `EntryCheck`.
        self._roster_fault = roster_fault
        self._settings = SettingsChange(context, ledger, rounds)
        self._ledger, self._rounds = ledger, rounds
        self._history, self._liveness, self._effects = context.history, context.liveness, context.effects
        # The order by which a region leaves that an open round still has, until when it waits at most.
        self._departure: EntryOrdered | None = None
        self._departure_limit_ns: int | None = None
        self._rest_ns = REST_HEARTBEATS * context.settings.heartbeat_ns
        self._named_at_ns: dict[str, int] = {}
        self.commit_index_before = 0
        # Of the entry of the last order; the next order waits until it is committed.
        self._ordered_index = 0

    def hear(self, peer: str, folder: FolderLife | None) -> None:
        """Take what a region tells of its folder, and say so if it is an older copy."""
        if reason := self._ledger.hear(peer, folder) if folder is not None else "":
            answer = "counts no more until it has caught up"
            if not self._ledger.folders.is_older(peer):
                answer = "counts all the same, for the others are too few"
            text = f"the folder of {peer} is an older copy: {reason}; it {answer}; never put a copy in its place"
            self._effects.note("disk", text, is_alarm=True)

    def propose(self, *, now_ns: int) -> list[Effect]:
        """Put the change that is due into the ledger, and say so; what the ledger wants for it."""
        if wishes := self._settings.advance(now_ns=now_ns):
            return wishes
        departure, self._departure = self._departure, None
        if departure is not None:
            return self.carry_out(departure, now_ns=now_ns)
        due = self.due(now_ns=now_ns) or self._eviction(now_ns)
        if due is None:
            return []
        news = f"the folder of {due.region} is now {due.disk.hex()}"
        if due.disk == EVICTED:
            news = f"{due.region} is away for long: it has no vote from now on, until it is back and has caught up"
        elif not due.disk:
            news = f"the folder of {due.region} is lost: another one is there, or an older copy"
        self._effects.note("disk", news, is_alarm=due.disk in (b"", EVICTED))
        return self._ledger.propose(due, now_ns=now_ns)

    def order_fault(self, order: EntryOrdered, *, now_ns: int) -> str:
        """Say why an operator's order can't be carried out here and now, with the remedy; empty if it can."""
        ledger, disks, body = self._ledger, self._ledger.disks, order.body
        if isinstance(body, SettingsBody):
            return self._settings.order_fault(body)
        if lasting_end(self._history.finished, self._history.settings) and not isinstance(body, RevokedBody):
            return RUN_IS_OVER
        fault, alive = "", self._liveness.alive(now_ns=now_ns)
        if not disks.has_view:
            is_witness = isinstance(body, MembershipBody) and body.kind == MemberKind.WITNESS
            remedy = "give the order again once it has" if is_witness else "leave the region out of run.toml"
            fault = f"the run has not begun: {remedy}"
        elif isinstance(body, MembershipBody):
            # Only who leads hears all the others.
            leader, is_forced = ledger.leader, order.is_forced
            fault = member_change.order_fault(body, disks.roster, leader=leader, alive=alive, is_forced=is_forced)
            fault = fault or self._promotion_fault(body, now_ns)
            fault = fault if ledger.is_settled else ""
        else:
            fault = self._order_fault(body, is_cut_off=order.is_cut_off)
        if fault := fault or member_change.leader_fault(ledger):
            return fault
        if max(disks.last_change_index, self._ordered_index) > ledger.cluster_commit_index:
            return "another change of the regions is not committed yet: try again"
        if isinstance(body, MembershipBody):
            return self._departure_fault(body) or self._roster_fault(disks.roster.changed(body))
        roster = disks.roster
        voters = roster.disks_without(body.region) if isinstance(body, DiskNamedBody) else roster.voter_disks
        there = {ledger.leader, *alive, roster.witness}
        fault = expulsion_fault(voters, body.region, there) if order.is_cut_off else ""
        return fault and f"{fault}{_renewal(body.region) * isinstance(body, RevokedBody)}"

    def _promotion_fault(self, body: MembershipBody, now_ns: int) -> str:
        """Say which voters that are there a region does not hear, or that don't hear it; empty if it may vote."""
        region, voters, liveness = body.region, self._ledger.disks.roster.voters, self._liveness
        if body.kind != MemberKind.VOTER or not liveness.is_alive(region, now_ns=now_ns):
            return ""
        apart = [
            name
            for name in voters
            if name != self._ledger.leader
            and liveness.is_alive(name, now_ns=now_ns)
            and not (liveness.hears(name, region, now_ns=now_ns) and liveness.hears(region, name, now_ns=now_ns))
        ]
        if not apart:
            return ""
        return (
            f"{region} and {', '.join(apart)} don't hear each other: after a failure of {self._ledger.leader} its vote "
            f"would help nobody. Mend the link first: `diloco-node status {region}` says what is wrong with it"
        )

    def _departure_fault(self, body: MembershipBody) -> str:
        """Say what is wrong with a change while another one waits for an open round; empty if none does."""
        leaves = self._departure.body if self._departure is not None else body
        if not isinstance(leaves, MembershipBody) or (leaves.region, leaves.kind) == (body.region, body.kind):
            return ""
        return f"{leaves.region} is about to leave, and an open round still has it: try again once it has left"

    def _order_fault(self, body: DiskNamedBody | RevokedBody, *, is_cut_off: bool) -> str:
        if isinstance(body, RevokedBody):
            return self._revocation_fault(body, is_cut_off=is_cut_off)
        is_lifted = body.disk != EXPELLED
        if body.region not in self._ledger.disks.roster.disks:
            return f"{body.region} is no member of the run"
        if (body.region in self._ledger.disks.roster.expelled) is not is_lifted:
            return f"{body.region} is {'not expelled' if is_lifted else 'expelled already'}"
        if body.region == self._ledger.disks.roster.witness:
            return f"{body.region} is the witness: remove it, `diloco-node members remove {body.region}`"
        if body.region == self._ledger.leader:
            return f"{body.region} leads: stop it first, and give the order to the region that leads then"
        return ""

    def _revocation_fault(self, body: RevokedBody, *, is_cut_off: bool) -> str:
        revocations = self._history.revocations
        if body.region not in self._ledger.disks.roster.memberships:
            return f"{body.region} was never a member of the run: its certificate makes no link"
        if body.certificate in revocations:
            return f"this certificate of {body.region} is revoked already"
        if len(revocations) >= REVOKED:
            return f"{len(revocations)} certificates are revoked: make another authority, diloco-node certs renew --ca"
        if body.region == self._ledger.leader and is_cut_off:
            return f"{body.region} leads with this certificate{_renewal(body.region)}"
        return ""

    def carry_out(self, order: EntryOrdered, *, now_ns: int) -> list[Effect]:
        """Put an operator's order into the ledger, if it still can be; what the ledger wants for it."""
        if isinstance(order.body, SettingsBody):
            return self._settings.carry_out(order.body, now_ns=now_ns)
        fault, body = self.order_fault(order, now_ns=now_ns), order.body
        if not fault and isinstance(body, MembershipBody) and body.kind == MemberKind.FORMER:
            fault = self._wait_for_rounds(order, body.region, now_ns)
            if self._departure is not None:
                return []
        if self._departure is None:
            self._departure_limit_ns = None
            if fault or not isinstance(body, MembershipBody) or body.kind != MemberKind.FORMER:
                self._rounds.let_go("")
        self._effects.note("disk", f"an operator {_words(body)}{fault and f': refused, {fault}'}", is_alarm=True)
        if fault and isinstance(body, MembershipBody) and body.region == self._ledger.leader:
            return self._ledger.transfer_leadership("an operator changes its membership", now_ns=now_ns)
        if fault:
            return []
        wishes = self._ledger.propose(body, now_ns=now_ns)
        self._ordered_index = self._ledger.disks.known_index
        return wishes

    def _wait_for_rounds(self, order: EntryOrdered, region: str, now_ns: int) -> str:
        """Keep the order until no open round has the region; why it is given up, empty if it is not."""
        if self._rounds.let_go(region):
            return ""
        deadlines_ns = (round_.deadline_ns for round_ in self._rounds.rounds.values())
        self._departure_limit_ns = self._departure_limit_ns or HOLD_NS + max(deadlines_ns, default=now_ns)
        if now_ns < self._departure_limit_ns:
            self._departure = order
            return ""
        return f"an open round has had {region} all the time: look at `status`, and order it again"

    def _eviction(self, now_ns: int) -> DiskNamedBody | None:
        """The voter whose vote is to be taken, for nobody has heard of it for long; None when none is."""
        ledger, disks = self._ledger, self._ledger.disks
        if not ledger.is_settled or max(disks.last_change_index, self._ordered_index) > ledger.cluster_commit_index:
            return None
        roster = disks.roster
        voters = [name for name in roster.voters if not roster.eviction_fault(name)]
        absence = self._liveness.absence
        absence.watch(self._liveness, now_ns=now_ns)  # since the last heartbeat to all it may have come back
        region = absence.longest(voters, now_ns=now_ns) if disks.has_view else ""
        return DiskNamedBody(region, EVICTED) if region else None

    def due(self, *, now_ns: int) -> DiskNamedBody | None:
        """The next change of the view; None when none is due, or one is not committed yet."""
        ledger, disks = self._ledger, self._ledger.disks
        caught_up_index, self.commit_index_before = self.commit_index_before, ledger.cluster_commit_index
        if not ledger.is_settled or not disks.has_view or disks.last_change_index > ledger.cluster_commit_index:
            return None
        for region, disk in sorted(ledger.reported_disks.items()):
            named_disk = disks.disk_of(region)
            if (disk == named_disk and not ledger.folders.is_older(region)) or region in disks.roster.expelled:
                continue
            if now_ns - self._named_at_ns.get(region, now_ns - self._rest_ns) < self._rest_ns:
                continue
            if named_disk:
                return DiskNamedBody(region, b"")
            # All that was committed a heartbeat ago is on the new folder: from there it can follow as anybody does.
            if ledger.durable_indexes[region] >= max(caught_up_index, disks.last_change_index):
                self._named_at_ns[region] = now_ns
                return DiskNamedBody(region, disk)
        return None


def _words(body: DiskNamedBody | RevokedBody | MembershipBody) -> str:
    match body:
        case DiskNamedBody(region, disk):
            return f"{'expels' if disk == EXPELLED else 'readmits'} {region}"
        case RevokedBody(region, certificate):
            return f"revokes certificate {certificate.hex()[:16]} of {region}"
        case MembershipBody(region, kind, address) if address:
            return f"adds {region} as a {kind}, at {address}"
        case MembershipBody(region, kind):
            return f"removes {region}" if kind == MemberKind.FORMER else f"makes {region} a {kind}"


def _renewal(region: str) -> str:
    return f": give {region} another one first, with diloco-node certs renew {region}"

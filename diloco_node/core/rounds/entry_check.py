"""Rules for the next entry of the ledger: every region asks them before it takes an entry.

The rules are those by which an honest leader makes entries (`core.rounds`), asked of the log as it is, committed or
not. So a leader that was captured, or is broken, can put nothing into the ledger that ends the run later.

- Genesis comes once, and is this run's, with the id of one state folder per region. Only `LeaderBody` comes before.
- A round takes its fragment to the next version, with members whose steps follow the token account.
- Discarded steps follow the account, too.
- After the end there are no more rounds, unless the run is extended.
- A revoked certificate is of a region of the run, and there are not too many.
- Settings change while the run goes on.
- Leaders vote. A change of the members is one that the roster allows, and that the run's authority has signed.

The leader's numbers are worked out again (`doubt`): weights, share and factors follow from the contributions and the
rounds before, and no sum of contributions is longer than they are together. It is asked of entries of the term whose
leader sends them, for then its settings are those here. Entries of earlier terms are not asked again.

The check goes back when entries are truncated. It replays nothing for that: the facts before each entry are remembered
until the entry is committed, and the account takes back its own changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from diloco_node.core.bounds import REVOKED
from diloco_node.core.ledger.account import Account
from diloco_node.core.ledger.disks import expulsion_fault
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.ledger.summary import RunSummary, decode_summary, summed_roster
from diloco_node.core.member_kind import WITNESS_NAME, MemberKind, MembershipBody
from diloco_node.core.merge.fragments import Fragment, Manifest
from diloco_node.core.merge.freivalds import are_rows_due, draw_windows, lacking_rows
from diloco_node.core.merge.numbers import MergeNumbers, is_same_number, length_limits, merge_numbers, outer_rates
from diloco_node.core.merge.outliers import RecentRounds, recent_after
from diloco_node.core.merge.stripes import piece_blocks, stripes_fault
from diloco_node.core.merge.weights import SQUARED_NORM_MAX, refusal, to_float32
from diloco_node.core.rounds.claim_limits import is_plausible_incarnation
from diloco_node.core.rounds.extension import extension_fault
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.types import (
    EVICTED,
    EXPELLED,
    Contribution,
    DiscardedBody,
    DiskNamedBody,
    Entry,
    ExtendedBody,
    FinishedBody,
    GenesisBody,
    LeaderBody,
    LedgerBase,
    RevokedBody,
    RoundBody,
    RunSettings,
    SnapshotBody,
    SummaryBody,
)
from diloco_node.errors import ProtocolViolation

T = TypeVar("T")

Coefficients = tuple[tuple[float, ...], ...]

Run = tuple[str, str, str, tuple[str, ...]]
"""run_id, settings_digest, manifest_digest and the regions that found it, sorted; none: this one joins later."""


def run_fault(run: Run, body: GenesisBody) -> str:
    """Return how the run of this genesis differs from this one, with both values; empty if it does not.

    The settings are not compared: genesis names those that the run began with, and some may change (D-093).
    """
    run_id, _, manifest_digest, regions = run
    pairs = (
        ("run.id", body.run_id, run_id),
        ("regions", ", ".join(body.regions), ", ".join(regions or body.regions)),
        ("model", body.manifest_digest, manifest_digest),
    )
    return "; ".join(f"its {label} is {there}, here it is {here}" for label, there, here in pairs if there != here)


def ledger_fault(run: Run, body: GenesisBody) -> str:
    """Return why a ledger that begins so is of another run; empty if it is of this one."""
    fault = run_fault(run, body)
    return f"the ledger is of another run: {fault}" if fault else ""


@dataclass(frozen=True, slots=True)
class _Facts:
    """Facts that the entries so far state, without the token account; as of `RoundHistory`, where it has them.

    versions: per fragment the last one; empty before genesis.
    snapshots: per fragment the version of the newest snapshot, 0 if there is none.
    summary: index of the last entry that the newest `SummaryBody` covers; 0 without one.
    end: of the run; None while it goes on.
    """

    roster: Roster
    settings: RunSettings
    versions: tuple[int, ...] = ()
    snapshots: tuple[int, ...] = ()
    recent: tuple[RecentRounds, ...] = ()
    summary: int = 0
    end: FinishedBody | None = None
    revocations: frozenset[bytes] = frozenset()

    def after(self, entry: Entry) -> _Facts:
        """Return the facts after one more entry."""
        facts = replace(self, roster=self.roster.after(entry))
        match entry.body:
            case GenesisBody() as body:
                zeros = (0,) * len(body.fragment_digests)
                recent = (RecentRounds(),) * len(zeros)
                settings = _settings_after(self.settings, body.settings)
                facts = replace(facts, settings=settings, versions=zeros, snapshots=zeros, recent=recent)
            case RoundBody() as body:
                recent = _with(self.recent, body.fragment, recent_after(self.recent, body))
                facts = replace(facts, versions=_with(self.versions, body.fragment, body.version), recent=recent)
            case SnapshotBody() as body:
                facts = replace(facts, snapshots=_with(self.snapshots, body.fragment, body.version))
            case SummaryBody() as body:
                facts = replace(facts, summary=body.index)
            case FinishedBody() as body:
                facts = replace(facts, end=body)
            case ExtendedBody():
                facts = replace(facts, end=None)
            case RevokedBody() as body:
                facts = replace(facts, revocations=self.revocations | {body.certificate})
            case SettingsBody() as body:
                facts = replace(facts, settings=body.within(self.settings))
        return facts


def _settings_after(settings: RunSettings, bodies: tuple[SettingsBody, ...]) -> RunSettings:
    return bodies[0].within(settings) if bodies else settings


def _with(values: tuple[T, ...], fragment: int, value: T) -> tuple[T, ...]:
    return (*values[:fragment], value, *values[fragment + 1 :])


class EntryCheck:
    """Follows the log (`core.ledger.entry_gate.Meaning`). run: the facts that all regions must agree on.

    witness: what this region itself did or got in a round otherwise than its entry says, by the coefficients of the
    members' pieces; empty if nothing.

    Attributes:
        roster_fault: why the run's authority has not signed a roster; empty if it has. Entries on this region's disk
            were asked when they came, perhaps of an authority before: it is set after those were taken.
    """

    def __init__(
        self,
        run: Run,
        manifest: Manifest,
        settings: RunSettings,
        *,
        witness: Callable[[RoundBody, Coefficients], str] = lambda *_: "",
    ) -> None:
        self._run = run
        self._settings, self._witness = settings, witness
        self.roster_fault: Callable[[Roster], str] = lambda _: ""
        self._fragments = manifest.fragments
        self._blocks = [piece_blocks(fragment.piece_sizes) for fragment in manifest.fragments]
        self._account = Account()
        self._facts = _Facts(Roster.of_voters(run[3]), settings)
        # The facts before each entry that may still be truncated, oldest first.
        self._before: deque[_Facts] = deque()
        self._rules: dict[type, Callable[[Any, Entry], str]] = {
            GenesisBody: self._genesis_fault,
            LeaderBody: lambda body, _: self._leader_fault(body.leader),
            RoundBody: self._round_fault,
            DiscardedBody: self._discard_fault,
            FinishedBody: self._finished_fault,
            ExtendedBody: lambda body, _: extension_fault(self._facts.end, body),
            DiskNamedBody: self._disk_fault,
            RevokedBody: self._revoked_fault,
            MembershipBody: lambda body, _: self._membership_fault(body),
            SnapshotBody: self._snapshot_fault,
            SummaryBody: self._summary_fault,
            SettingsBody: self._settings_fault,
        }

    @property
    def index(self) -> int:
        """The last entry that was taken."""
        return self._account.index

    def begin(self, base: LedgerBase) -> None:
        """Go on from a base as if its entries had been taken.

        Raises ProtocolViolation: the base is not one of such a ledger.
        """
        summary = decode_summary(base.summary, fragments=len(self._fragments))
        snapshots = (0,) * len(self._fragments)
        for body in summary.snapshots:
            snapshots = _with(snapshots, body.fragment, body.version)
        # The base does not say how far the last named summary went, so `summary` begins at 0: an entry after the base
        # may name an older one.
        self._facts = _Facts(
            summed_roster(summary),
            _settings_after(self._settings, summary.settings or summary.genesis[0].settings),
            summary.versions,
            snapshots,
            self._recent_rounds(summary),
            end=next(iter(summary.finished), None),
            revocations=frozenset(summary.revocations),
        )
        self._before.clear()
        self._account.restore(summary, base.index)

    def base_fault(self, base: LedgerBase) -> str:
        """Return why a base can't be one of this run's ledger; empty if it can."""
        try:
            summary = decode_summary(base.summary, fragments=len(self._fragments))
            self._recent_rounds(summary)
        except ProtocolViolation as error:
            return str(error)
        genesis = summary.genesis[0]
        return self._base_roster_fault(summed_roster(summary), genesis) or ledger_fault(self._run, genesis)

    def _base_roster_fault(self, roster: Roster, genesis: GenesisBody) -> str:
        changes = (self._before[0] if self._before else self._facts).roster.changes
        if roster.changes < changes:
            return f"its members changed {roster.changes} times, {changes} changes are committed here"
        if roster.changes:
            return self.roster_fault(roster)
        voters = tuple(name for name in roster.memberships if roster.kind_of(name) is MemberKind.VOTER)
        if voters == tuple(sorted(genesis.regions)) == tuple(roster.memberships):
            return ""
        return f"its voters are {', '.join(voters)}, and no change of the members led there"

    def fault(self, entry: Entry) -> str:
        """Return why the entry can't be the next one; empty if it can."""
        body = entry.body
        rule = self._rules.get(type(body))
        if rule is None:
            return f"{type(body).__name__} is not known here"
        if not self._facts.versions and not isinstance(body, (GenesisBody, LeaderBody)):
            return f"a {type(body).__name__} before genesis"
        return rule(body, entry)

    def doubt(self, entry: Entry) -> str:
        """How the numbers of an entry without a `fault` differ from what the ledger gives; empty if not."""
        body = entry.body
        if isinstance(body, ExtendedBody):
            own = ExtendedBody(self._settings.steps_max, self._settings.tokens_max)
            return "" if body == own else f"it extends the run to {body}, this region was started with {own}"
        if isinstance(body, SettingsBody | GenesisBody):
            return self._settings_doubt(body)
        if not isinstance(body, RoundBody):
            return ""
        contributions = tuple(member.contribution for member in body.members)
        recent, settings = self._facts.recent[body.fragment], self._facts.settings
        rates = outer_rates(settings, is_last=body.is_last)
        if (body.outer_lr, body.outer_momentum) != rates:
            return f"its outer step has the rates {body.outer_lr} and {body.outer_momentum}, the settings say {rates}"
        numbers = merge_numbers(
            self._fragments[body.fragment],
            settings,
            contributions,
            carried_since=[self._account.carried_since(contribution) for contribution in contributions],
            recent=recent,
            version=body.version,
            is_last=body.is_last,
        )
        limits = length_limits(numbers.radii(), settings)
        for piece, (square, limit) in enumerate(zip(body.squared_norms, limits, strict=True)):
            if square > limit:
                return (
                    f"its sum of piece {piece} has the squared norm {square:.6g}, its members can't exceed {limit:.6g}"
                )
        coefficients = numbers.coefficients()
        return _difference(body, numbers) or _lack(body, coefficients) or self._witness(body, coefficients)

    def _settings_doubt(self, body: SettingsBody | GenesisBody) -> str:
        bodies = body.settings if isinstance(body, GenesisBody) else (body,)
        names = body.regions if isinstance(body, GenesisBody) else self._facts.roster.names
        faults = (settings.fault(len(names), self._settings.heartbeat_ns) for settings in bodies)
        return next((fault for fault in faults if fault), "")

    def take(self, entry: Entry) -> None:
        """Take the entry as the next one."""
        self._account.take(entry)
        if entry.index % self._settings.summary_entries == 0:
            # As every region's sum after this entry does: a check behind a base answers alike.
            self._account.close_old(len(self._fragments))
        self._before.append(self._facts)
        self._facts = self._facts.after(entry)

    def back_to(self, index: int) -> None:
        """Take back the entries after this index: they are not in the log any more."""
        assert self.index - index <= len(self._before), (self.index, index)
        while self.index > index:
            self._facts = self._before.pop()
            self._account.back_to(self.index - 1)

    def settle(self, index: int) -> None:
        """Keep the entries up to this index for ever."""
        while len(self._before) > max(0, self.index - index):
            self._before.popleft()
        self._account.settle(index)

    def _recent_rounds(self, summary: RunSummary) -> tuple[RecentRounds, ...]:
        rounds = tuple(map(RecentRounds.unpacked, summary.recent))
        for fragment, (recent, layout) in enumerate(zip(rounds, self._fragments, strict=True)):
            if recent.rounds and len(recent.sums) != len(layout.pieces):
                raise ProtocolViolation(
                    f"norms of {len(recent.sums)} pieces of fragment {fragment}, which has {len(layout.pieces)}"
                )
        return rounds

    def _genesis_fault(self, body: GenesisBody, _: Entry) -> str:
        if self._facts.versions:
            return "a second genesis"
        if difference := run_fault(self._run, body):
            return f"genesis of another run: {difference}"
        if len(body.fragment_digests) != len(self._fragments):
            return f"{len(body.fragment_digests)} digests for {len(self._fragments)} fragments"
        if WITNESS_NAME in body.regions:
            return f"{WITNESS_NAME} is the witness's name, and no region's"
        if len(body.disks) != len(body.regions) or len(set(body.disks)) != len(body.disks) or b"" in body.disks:
            return f"{len(set(body.disks))} different ids of folders for {len(body.regions)} regions, each with one"
        return ""

    def _disk_fault(self, body: DiskNamedBody, _: Entry) -> str:
        """Entries that take a folder's id away and that name one alternate."""
        roster = self._facts.roster
        disk = roster.disks.get(body.region, b"")
        if body.disk == EXPELLED != disk:
            return self._region_fault(body.region) or expulsion_fault(roster.disks_without(body.region), body.region)
        if body.disk == EVICTED:
            return self._region_fault(body.region) or roster.eviction_fault(body.region)
        disk = b"" if disk == EVICTED else disk
        if bool(disk) == bool(body.disk):
            return f"{body.region}'s folder is {disk.hex() or 'none'}, named is {body.disk.hex() or 'none'}"
        return "" if body.region == roster.witness else self._region_fault(body.region)

    def _revoked_fault(self, body: RevokedBody, _: Entry) -> str:
        if len(self._facts.revocations | {body.certificate}) > REVOKED:
            return f"{REVOKED} certificates are revoked already"
        return self._region_fault(body.region, is_former_welcome=True)

    def _snapshot_fault(self, body: SnapshotBody, _: Entry) -> str:
        fault = self._fragment_fault(body.fragment)
        if fault:
            return fault
        last, version = self._facts.snapshots[body.fragment], self._facts.versions[body.fragment]
        if not last < body.version <= version:
            return f"a snapshot at version {body.version}, after {last}, where version {version} is reached"
        return ""

    def _summary_fault(self, body: SummaryBody, entry: Entry) -> str:
        last = self._facts.summary
        return "" if last < body.index < entry.index else f"a summary up to entry {body.index}, after one up to {last}"

    def _settings_fault(self, body: SettingsBody, _: Entry) -> str:
        if self._facts.end is not None:
            return "settings after the end"
        return "" if body != SettingsBody.of(self._facts.settings) else "settings that change nothing"

    def _region_fault(self, name: str, *, is_former_welcome: bool = False) -> str:
        roster = self._facts.roster
        is_known = name in (roster.memberships if is_former_welcome else roster.names) and name != roster.witness
        return "" if is_known else f"{name} is no region of the run"

    def _leader_fault(self, name: str) -> str:
        if not self._run[3] and not self._facts.versions:
            return ""  # This region joins, and learns from the next entries who founded the run.
        is_voter = name in self._facts.roster.voters and name in self._facts.roster.names
        return self._region_fault(name) or ("" if is_voter else f"{name} leads, and does not vote")

    def _fragment_fault(self, fragment: int) -> str:
        return "" if 0 <= fragment < len(self._fragments) else f"there is no fragment {fragment}"

    def _finished_fault(self, body: FinishedBody, _: Entry) -> str:
        if self._facts.end is not None:
            return "a second end"
        versions = self._facts.versions
        return "" if body.versions == versions else f"ends at versions {body.versions}, the ledger is at {versions}"

    def _discard_fault(self, body: DiscardedBody, _: Entry) -> str:
        fault = self._region_fault(body.learner, is_former_welcome=True)
        return fault or self._fragment_fault(body.fragment) or self._account_fault(body)

    def _account_fault(self, body: Contribution | DiscardedBody) -> str:
        fault = self._account.fault(body)
        newest = max(0, self._account.newest_incarnation(body.learner))
        if not fault and not is_plausible_incarnation(body.incarnation, newest):
            return f"incarnation {body.incarnation} of {body.learner} is too far ahead of {newest}"
        return fault

    def _round_fault(self, body: RoundBody, entry: Entry) -> str:
        fault = self._fragment_fault(body.fragment)
        if fault:
            return fault
        next_version = self._facts.versions[body.fragment] + 1
        if self._facts.end is not None:
            return "a round after the end"
        if body.version != next_version:
            return f"version {body.version} of fragment {body.fragment}, the next is {next_version}"
        if body.ballot.term != entry.term:  # audits follow a leader's ballots, in their order
            return f"ballot {body.ballot} in an entry of term {entry.term}"
        return (
            self._members_fault(body)
            or self._numbers_fault(body, self._fragments[body.fragment])
            or stripes_fault(body.stripes, regions=self._facts.roster.names, blocks=sum(self._blocks[body.fragment]))
            or self._projections_fault(body)
        )

    def _membership_fault(self, body: MembershipBody) -> str:
        roster = self._facts.roster
        return roster.change_fault(body) or self.roster_fault(roster.changed(body))

    def _members_fault(self, body: RoundBody) -> str:
        names = [member.contribution.learner for member in body.members]
        if not names or names != sorted(set(names)):
            return f"members {', '.join(names) or '(none)'} are not sorted, are repeated, or there are none"
        faults = (
            self._region_fault(member.contribution.learner) or self._contribution_fault(member.contribution, body)
            for member in body.members
        )
        return next((fault for fault in faults if fault), "")

    def _contribution_fault(self, contribution: Contribution, body: RoundBody) -> str:
        name = contribution.learner
        if contribution.fragment != body.fragment:
            return f"{name} contributes to fragment {contribution.fragment}, the round is of {body.fragment}"
        if not 0 <= contribution.base_version < body.version:
            return f"{name}'s base is version {contribution.base_version} for a round to version {body.version}"
        fault = refusal(contribution, len(self._fragments[body.fragment].pieces))
        return f"{name} {fault}" if fault else self._account_fault(contribution)

    def _projections_fault(self, body: RoundBody) -> str:
        windows = len(draw_windows(body.nonces, body.stripes, self._blocks[body.fragment]))
        rows = [len(row) for row in body.projections]
        if rows and (len(rows) != len(body.members) or not windows or not {0, windows} >= set(rows)):
            return f"projections in {rows} windows for {len(body.members)} members in {windows}"
        return ""

    @staticmethod
    def _numbers_fault(body: RoundBody, fragment: Fragment) -> str:
        weights = [member.weight for member in body.members]
        if not len(body.factors) == len(body.squared_norms) == len(fragment.pieces):
            counts = f"{len(body.factors)} factors and {len(body.squared_norms)} norms"
            return f"{counts} for {len(fragment.pieces)} pieces"
        # Of a merged payload it is a little more than of the contributions, for its values are rounded.
        if any(square > 4.0 * SQUARED_NORM_MAX for square in body.squared_norms):
            return f"squared norms of the payload up to {max(body.squared_norms)}"
        if not any(weights) or any(weight < 0.0 for weight in weights) or not 0.0 < body.share <= 1.0:
            return f"weights {weights} with share {body.share}"
        if any(to_float32(number) != number for number in (*weights, *body.factors, body.share)):
            return "a weight, factor or share that is no float32"
        return ""


def _lack(body: RoundBody, coefficients: Coefficients) -> str:
    """Return whose projections an entry should have and has not; empty if it has all that are due."""
    places = lacking_rows(coefficients, body.projections) if are_rows_due(body.nonces) else []
    names = ", ".join(body.members[place].contribution.learner for place in places)
    return f"it lacks the projections of {names}, which are due in this audit" if names else ""


def _difference(body: RoundBody, numbers: MergeNumbers) -> str:
    """Return the first number of an entry that is not what follows; empty if all are."""
    rows = (
        ("weight", [member.weight for member in body.members], numbers.weights),
        ("share", [body.share], [numbers.share]),
        ("factor", body.factors, numbers.factors(body.squared_norms)),
    )
    for name, claims, results in rows:
        for place, (claim, result) in enumerate(zip(claims, results, strict=True)):
            if not is_same_number(claim, result):
                return f"its {name} {place} is {claim:.9g}, {result:.9g} follows from its members"
    return ""

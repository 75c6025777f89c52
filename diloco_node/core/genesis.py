"""How a run begins: the first leader with a whole Theta_0 proposes genesis, and every region checks it."""

from __future__ import annotations

from collections.abc import Iterable

from diloco_node.core.ledger.raft import LedgerCore
from diloco_node.core.recovery.fetches import Fetches
from diloco_node.core.recovery.versions import Versions
from diloco_node.core.rounds.context import RoundContext
from diloco_node.core.rounds.entry_check import Run
from diloco_node.core.rounds.history import RoundHistory
from diloco_node.core.rounds.leader import RoundLeader
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.types import Entry, GenesisBody


def founders_of(run: tuple[str, ...], region: str, history: RoundHistory, entries: Iterable[Entry]) -> tuple[str, ...]:
    """The regions that founded a run: as its ledger on disk says, else as this region's settings do.

    run: the regions of the settings, sorted. Without this one it joins a run that has begun: it founds none.
    """
    bodies = (history.genesis, *(entry.body for entry in entries))
    return next((body.regions for body in bodies if isinstance(body, GenesisBody)), run if region in run else ())


class Genesis:
    """Theta_0 until genesis is committed.

    run: what all regions must agree on. listing: of the frozen tensors of the learner that attached last.
    """

    def __init__(
        self,
        run: Run,
        context: RoundContext,
        *,
        ledger: LedgerCore,
        leader: RoundLeader,
        versions: Versions,
        fetches: Fetches,
    ) -> None:
        self._run = run
        self._history, self._effects = context.history, context.effects
        self._ledger, self._leader = ledger, leader
        self._versions, self._fetches = versions, fetches
        self._proposed_term = 0
        self.listing = b""

    @property
    def wants_initial_state(self) -> bool:
        """Whether Theta_0 of a new learner is of use: some of it is not on disk, or it is mixed of two regions' and no
        fetch will mend that; and no genesis is in the ledger here.

        Where one is, only the bytes that it names count; on disk they must not be written over, and what is lacking
        is fetched.
        """
        ledger = self._ledger
        is_mixed = self._versions.initial.is_mixed and self._fetches.is_idle
        is_lacking = (is_mixed or min(self._versions.states) < 0) and ledger.base.index == 0
        is_lacking = is_lacking and self._history.genesis is None
        bodies = (ledger.entry(index).body for index in range(1, ledger.last_index + 1))  # it is an early one
        return is_lacking and not any(isinstance(body, GenesisBody) for body in bodies)

    def propose(self) -> None:
        """Propose genesis, once in each term that this region leads, when its disk holds all of Theta_0."""
        term = self._ledger.term
        if not self._leader.is_acting or self._history.genesis is not None or self._proposed_term == term:
            return
        digests, founders = self._versions.initial_digests, self._ledger.founders
        if digests is not None and founders and not self._fetches.brings_other_initial(digests):
            self._proposed_term = term
            run_id, settings_digest, manifest_digest, regions = self._run
            disks, settings = tuple(founders[name] for name in regions), (SettingsBody.of(self._history.settings),)
            self._leader.proposals.append(
                GenesisBody(run_id, manifest_digest, settings_digest, regions, digests, disks, self.listing, settings)
            )

    def on_commit(self, body: GenesisBody) -> None:
        """Say that the run has begun."""
        note = "; settings were changed since it began" if body.settings_digest != self._run[1] else ""
        self._effects.note("genesis", f"run {body.run_id} of {', '.join(body.regions)} has begun{note}")

"""Faults to plant: each breaks one rule on purpose, to show that some checker finds it.

A fault is planted into every region of a run. Most replace one small decision inside the real core, some make the fake
disk or data plane lie. `FAULTS` names them all; `diloco-node simulate run --fault NAME` runs one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from diloco_node.core.events import ContributionStripeArrived
from diloco_node.core.region import RegionCore
from diloco_node.core.types import Ballot, Codec, Recovered
from diloco_node.errors import ConfigError
from diloco_node.sim import view
from diloco_node.sim.host import Host
from diloco_node.sim.setup import Setup

MIN_DEADLINE_NS = 100_000_000


def make_core(region: str, setup: Setup, recovered: Recovered, seed: int, now_ns: int) -> Any:
    """The real core, unharmed."""
    return RegionCore(
        region=region,
        regions=setup.regions,
        run_id="simulated",
        settings_digest="simulated",
        manifest=setup.manifest,
        settings=setup.settings,
        recovered=recovered,
        seed=seed,
        now_ns=now_ns,
    )


def _unchanged(setup: Setup) -> Setup:
    return setup


def _nothing(_: Any) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Fault:
    """One broken rule.

    Attributes:
        name: as on the command line.
        breaks: the rule, in words.
        spoil: changes a core right after it was made.
        plant: changes a host before the run.
        adapt: changes the run so that the fault can show.
    """

    name: str
    breaks: str
    spoil: Callable[[Any], None] = _nothing
    plant: Callable[[Host], None] = _nothing
    adapt: Callable[[Setup], Setup] = _unchanged

    def make_core(self, region: str, setup: Setup, recovered: Recovered, seed: int, now_ns: int) -> Any:
        """The real core with the fault in it."""
        core = make_core(region, setup, recovered, seed, now_ns)
        self.spoil(core)
        return core


def _answer_before_fsync(host: Host) -> None:
    host.fsync_is_late = True


def _keep_any_residual(host: Host) -> None:
    host.is_residual_loose = True


def _with_residuals(setup: Setup) -> Setup:
    """Lossy merges, and deadlines so short that many ballots are given up after they were reduced."""
    settings = replace(
        setup.settings, error_feedback=True, codec_down=Codec.BF16, ballot_deadline_min_ns=MIN_DEADLINE_NS
    )
    return replace(setup, settings=settings)


def _sum_as_they_come(host: Host) -> None:
    host.is_order_loose = True


def _with_every_bit(setup: Setup) -> Setup:
    return replace(setup, settings=replace(setup.settings, codec_down=Codec.FP32))


def _persist_without_payload(core: Any) -> None:
    view.ledger(core)._may_persist = lambda entry: True  # type: ignore[method-assign]


def _take_uncommitted(core: Any) -> None:
    ledger = view.ledger(core)
    taken = [0]

    def take() -> list[Any]:
        first, last = taken[0], max(taken[0], ledger.last_index)
        taken[0] = last
        return list(ledger.entries[first:last])

    ledger.take_committed = take  # type: ignore[method-assign]


def _forget_vote(core: Any) -> None:
    view.ledger(core)._vote_to_persist = lambda: ""  # type: ignore[method-assign]


def _count_old_terms(core: Any) -> None:
    view.ledger(core)._may_commit = lambda index: True  # type: ignore[method-assign]


def _contribute_too_early(core: Any) -> None:
    """The member takes its snapshot against whatever it has; leader and reducers take it for one of this round."""
    core.history.last_version = lambda learner, fragment: -1
    keep_stripe = view.participant(core).stripe_arrived

    def keep_any_stripe(event: ContributionStripeArrived) -> None:
        newest = core.history.versions[event.contribution.fragment]
        base_version = max(event.contribution.base_version, newest)
        keep_stripe(replace(event, contribution=replace(event.contribution, base_version=base_version)))

    view.participant(core).stripe_arrived = keep_any_stripe  # type: ignore[method-assign]
    view.participant(core)._may_contribute = lambda fragment, version: ""  # type: ignore[method-assign]
    view.rounds(core)._answers.may_contribute = lambda offered, version: ""  # type: ignore[method-assign]


def _with_late_learners(setup: Setup) -> Setup:
    """Learners take a version so late that the next round of the fragment may be open by then."""
    return replace(setup, apply_lag_max=3 * setup.settings.sync_every)


def _add_in_order_of_arrival(core: Any) -> None:
    def order(named: Any, arrived: list[tuple[tuple[str, int, int], Any]]) -> list[int]:
        places = {name: place for place, (name, _) in reversed(list(enumerate(arrived)))}
        known = {one: (one.learner, one.incarnation, one.snapshot) for one in named}
        return sorted(range(len(named)), key=lambda at: places.get(known[named[at]], 0))

    view.participant(core)._order_of_sum = order  # type: ignore[method-assign]


def _reuse_ballots(core: Any) -> None:
    leader = view.rounds(core)
    leader._next_number = lambda: Ballot(leader._term, 1)  # type: ignore[method-assign]


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault(
            "no-fsync",
            "an acknowledgement leaves only after the fsync",
            plant=_answer_before_fsync,
        ),
        Fault(
            "no-payload",
            "an entry is acknowledged only with its payload on the own disk",
            spoil=_persist_without_payload,
        ),
        Fault(
            "apply-before-commit",
            "only committed rounds are applied",
            spoil=_take_uncommitted,
        ),
        Fault(
            "forgotten-vote",
            "a vote is on disk before it is given",
            spoil=_forget_vote,
        ),
        Fault(
            "stale-base",
            "a contribution's base is at least the last version that includes its learner",
            spoil=_contribute_too_early,
            adapt=_with_late_learners,
        ),
        Fault(
            "kept-residual",
            "the residual of an abandoned ballot is dropped",
            plant=_keep_any_residual,
            adapt=_with_residuals,
        ),
        Fault(
            "arrival-order",
            "contributions are summed in the order of learner names",
            spoil=_add_in_order_of_arrival,
            adapt=_with_every_bit,
        ),
        Fault(
            "old-term",
            "entries of older terms are never committed by counting",
            spoil=_count_old_terms,
        ),
        Fault(
            "reused-ballot",
            "a ballot is used once",
            spoil=_reuse_ballots,
        ),
    )
}


def find(name: str) -> Fault:
    """The fault of this name.

    Raises:
        ConfigError: there is none.
    """
    if name not in FAULTS:
        raise ConfigError(f"there is no fault {name!r} to plant; there are {', '.join(sorted(FAULTS))}")
    return FAULTS[name]

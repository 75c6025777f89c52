"""Faults to plant into log, account, versions, fetches, snapshots and blame; see `core_faults`."""

from dataclasses import replace
from typing import Any

from diloco_node.core.rounds import evidence
from diloco_node.core.types import SnapshotBody
from diloco_node.lab.sim.planting import Fault


def _agree_with_half(core: Any) -> None:
    """As `majority_snapshots`, with `>=` for `>`."""
    watch = core._upkeep.digests

    def half_snapshots(_: object) -> tuple[SnapshotBody, ...]:
        bodies = []
        for fragment in range(len(watch._own)):
            for version, digest in sorted(watch._waiting(fragment).items(), reverse=True):
                equal = watch._peer_digests(fragment, version).count(digest)
                if version <= core.history.versions[fragment] and 2 * (1 + equal) >= len(core.history.roster.voters):
                    bodies.append(SnapshotBody(fragment, version, digest))
                    break
        return tuple(bodies)

    watch.majority_snapshots = half_snapshots


def _trust_any_base(core: Any) -> None:
    core.ledger._log._has_base = lambda: True


def _count_any_answer(core: Any) -> None:
    """As if each answer of the disk were about the newest write."""
    log: Any = core.ledger._log
    count = log.on_written
    log.on_written = lambda token: count(max([token, *(write.token for write in log._writes)]))


def _lose_closed_steps(core: Any) -> None:
    account = core.history.account
    close = account._close

    def close_without_steps(learner: str, incarnation: int, fragments: int) -> None:
        close(learner, incarnation, fragments)
        account._closed[learner] = replace(account._closed[learner], steps=0)

    account._close = close_without_steps


def _forget_unapplied(core: Any) -> None:
    """As `_forget`, without a look at what is applied."""
    versions = core.versions
    forget = versions._forget

    def forget_more(fragment: int) -> None:
        forget(fragment)
        oldest = core.history.snapshots.oldest(fragment)
        if oldest is not None and fragment not in versions._healing:
            forgotten = [key for key in versions._payloads if key[0] == fragment and key[1] <= oldest.version]
            for key in forgotten:
                del versions._payloads[key]

    versions._forget = forget_more


class _Unforgiving(list[str]):
    """Peers that failed, for good."""

    def clear(self) -> None:
        """Keep them."""


def _ask_once(core: Any) -> None:
    """Who could not help once is asked no more."""
    fetches = core._fetches
    request, choose = fetches.request, fetches._choose

    def request_unforgiving(fragment: int, *what: Any, **more: Any) -> None:
        request(fragment, *what, **more)
        fetch = fetches.pending[fragment]
        if type(fetch.failed) is list:
            fetch.failed = _Unforgiving(fetch.failed)

    fetches.request = request_unforgiving
    fetches._choose = lambda fetch, leader, alive, witness: choose(
        fetch, leader, [name for name in alive if name not in fetch.failed], witness
    )


def _believe_half(core: Any) -> None:
    """As `judge_digests`, with `>=` for `>`."""
    judge = core.leader._judge

    def judge_half(round_: Any, *, now_ns: int) -> str:
        observers = len(core.history.roster.names) - 1
        blames = [evidence._dispute_with(round_, reducer, observers - 1) for reducer in round_.reducers]
        proved = [blame for blame in blames if blame is not None and observers > 1]
        judge.blame_all(round_, proved, now_ns=now_ns)
        return "; ".join(blame.reason for blame in proved)

    judge.judge_digests = judge_half


RECOVERY_FAULTS = (
    Fault("half-blames", "half of the witnesses prove nothing", spoil=_believe_half),
    Fault("half-snapshot", "a snapshot needs a majority that holds its bytes", spoil=_agree_with_half),
    Fault("base-first", "a base is acknowledged when its states are on the own disk", spoil=_trust_any_base),
    Fault(
        "any-answer", "the disk's answer counts for the write that it names and those before", spoil=_count_any_answer
    ),
    Fault("closed-steps", "steps of closed lives stay in the account", spoil=_lose_closed_steps),
    Fault("forgotten-payload", "a committed payload is kept until it is applied", spoil=_forget_unapplied),
    Fault("asked-once", "whoever could not send something is asked again, later", spoil=_ask_once),
)

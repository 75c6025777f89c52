"""A region's parameters, computed again from its files by the outer steps of the daemon; compared with the ledger."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from diloco_node.core.recovery.past_versions import PastVersion
from diloco_node.core.recovery.replay_plan import FragmentReplay, plan_replay
from diloco_node.core.types import Entry, RoundBody
from diloco_node.daemon.effects.open_stripes import cut_payload
from diloco_node.daemon.parameters import OUTER_THREADS, Parameters
from diloco_node.daemon.past_run import find_past
from diloco_node.daemon.run_files import ARCHIVE_HINT, TRIES, RunFiles
from diloco_node.errors import StorageError
from diloco_node.state_names import FINAL_NAME


@dataclass(frozen=True, slots=True)
class DigestCheck:
    """A digest of the ledger beside the computed one."""

    fragment: int
    version: int
    named: bytes
    computed: bytes

    @property
    def agrees(self) -> bool:
        """Whether they are equal."""
        return self.named == self.computed


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """The outcome of a replay. plan: per fragment where it began, and why not earlier.

    final: whether `final.safetensors` holds the computed parameters; None: the run is not over, or it is not there.
    """

    plan: tuple[FragmentReplay, ...]
    checks: tuple[DigestCheck, ...]
    final: bool | None

    @property
    def agrees(self) -> bool:
        """Whether everything that could be compared is equal."""
        return all(check.agrees for check in self.checks) and self.final is not False


class Replay:
    """Reads a state folder, also below a running daemon; `run` computes. Raises StorageError, ConfigError: what is
    missing or damaged, and what to do."""

    def __init__(self, folder: Path) -> None:
        self._files = files = RunFiles.read(folder)
        entries, states, payloads = files.entries, files.states, files.payloads
        if not files.is_finished:
            entries = _without_tail(entries, states, payloads)
        self.plan = tuple(plan_replay(files.genesis, files.summary, entries, states, payloads))
        lacking = [fragment.lack for fragment in self.plan if fragment.start < 0]
        if lacking:
            more = f" (and so for {len(lacking) - 1} further fragments)" if len(lacking) > 1 else ""
            raise StorageError(f"{folder} lacks {lacking[0]}{more}: replay another region's folder; {ARCHIVE_HINT}")

    @property
    def rounds(self) -> int:
        """How many outer steps there are to take."""
        return sum(len(fragment.rounds) for fragment in self.plan)

    def run(self, on_round: Callable[[], None]) -> ReplayReport:
        """Compute, and call `on_round` after each outer step. Raises StorageError: as `compute`."""
        parameters, checks = compute(self._files, self.plan, on_round)
        return ReplayReport(tuple(self.plan), checks, self._compare_final(parameters))

    def _compare_final(self, parameters: Parameters) -> bool | None:
        path = self._files.folder / FINAL_NAME
        if not self._files.is_finished or not path.exists():
            return None
        tensors = parameters.full_tensors()
        try:
            with safe_open(path, framework="np") as file:
                if set(file.keys()) != tensors.keys():
                    return False
                # As bytes: 0 is not -0.
                return all(file.get_tensor(name).tobytes() == values.tobytes() for name, values in tensors.items())
        except (OSError, SafetensorError) as error:
            raise StorageError(f"{path} can't be read: {error}") from error


def compute(
    files: RunFiles, plan: Sequence[FragmentReplay], on_round: Callable[[], None]
) -> tuple[Parameters, tuple[DigestCheck, ...]]:
    """Take the outer steps of a plan, and call `on_round` after each one.

    Returns: parameters and momentum, and the digests that the ledger names on the way beside those computed.

    Raises StorageError: a file is damaged, or is gone since: the daemon that runs here may have removed it.
    """
    return asyncio.run(_compute(files, plan, on_round))


async def _compute(
    files: RunFiles, plan: Sequence[FragmentReplay], on_round: Callable[[], None]
) -> tuple[Parameters, tuple[DigestCheck, ...]]:
    with ThreadPoolExecutor(OUTER_THREADS) as pool:
        parameters = Parameters(files.manifest, files.spec.settings, files.store, pool)
        checks = []
        for fragment in plan:
            await parameters.adopt(fragment.fragment, fragment.start)
            checks += await _check(parameters, fragment)
            for body in fragment.rounds:
                await _step(files, parameters, body)
                on_round()
                checks += await _check(parameters, fragment)
    return parameters, tuple(checks)


async def _step(files: RunFiles, parameters: Parameters, body: RoundBody) -> None:
    try:
        payload = files.store.read_payload(body.fragment, body.version, body.payload_digest)
    except StorageError as error:
        raise StorageError(
            f"{error}. If a daemon runs here it may have removed the file meanwhile: try again; {ARCHIVE_HINT}"
        ) from error
    await parameters.apply(body, cut_payload(payload, parameters.blocks[body.fragment], body.stripes), None)


async def _check(parameters: Parameters, fragment: FragmentReplay) -> list[DigestCheck]:
    ledger_digest = fragment.digests.get(parameters.versions[fragment.fragment])
    if ledger_digest is None:
        return []
    version, own_digest = await parameters.digest(fragment.fragment)
    return [DigestCheck(fragment.fragment, version, ledger_digest, own_digest)]


def read_past(
    folders: Sequence[Path], *, version: int | None = None, step: int | None = None
) -> tuple[RunFiles, PastVersion, Parameters]:
    """Compute an earlier version, as for `find_past`; its folder, version and parameters. Raises ConfigError: it can't
    be had. StorageError: a file is damaged, or gives other bytes than the ledger names."""
    tries = TRIES
    while True:
        run, past = find_past(folders, version=version, step=step)
        try:
            parameters, checks = compute(run.files, run.reachable.plan(past), lambda: None)
            break
        except StorageError:
            files, tries = RunFiles.read(run.files.folder), tries - 1
            if not tries or (files.states, files.payloads) == (run.files.states, run.files.payloads):
                raise  # no daemon has changed anything: it would fail again
    for check in checks:
        if not check.agrees:
            raise StorageError(
                f"{run.files.folder}: fragment {check.fragment} version {check.version} differs from what the ledger "
                "names: take another region's folder, and look at this disk"
            )
    return run.files, past, parameters


def _without_tail(
    entries: Sequence[Entry], states: Sequence[Sequence[int]], payloads: Collection[tuple[int, int, bytes]]
) -> tuple[Entry, ...]:
    """Drop each fragment's last rounds, from the first behind its newest state whose payload is not here: a daemon may
    fetch it, or the round is not committed."""
    replayable, holes = [], set()
    for entry in entries:
        body = entry.body
        if isinstance(body, RoundBody) and body.version > max(states[body.fragment], default=-1):
            if (body.fragment, body.version, body.payload_digest) not in payloads:
                holes.add(body.fragment)
            if body.fragment in holes:
                continue
        replayable.append(entry)
    return tuple(replayable)

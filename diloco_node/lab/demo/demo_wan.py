"""The WAN of a demo: brought up, measured before the training, cut and healed during it, and its part of the report."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from diloco_node.errors import ConfigError, DilocoError
from diloco_node.lab.demo.demo_options import DemoOptions
from diloco_node.lab.demo.region_processes import RegionProcess
from diloco_node.lab.wan import emulation
from diloco_node.lab.wan.emulation_state import EmulationState
from diloco_node.lab.wan.namespaces import Place
from diloco_node.lab.wan.pair_measurement import measure_pairs, pair_line
from diloco_node.lab.wan.topology import Topology, load_topology

OUTAGE_FROM: Final = 0.4
OUTAGE_UNTIL: Final = 0.6
"""The region is cut off between these parts of the training time."""

POLLS_MAX: Final = 10
"""So often a region is asked, two seconds each, before what was known of it has to do."""

HEALED_POLL_S: Final = 0.1
"""How often the regions are asked after a heal, until they are equal again."""


class DemoWan:
    """The emulated WAN of one demo; `place` and `names` are there at once, packets pass after `up`.

    Raises:
        ConfigError: the topology is wrong, the back-end asked for can't be had, or there are outages without a
        back-end.
    """

    def __init__(self, options: DemoOptions) -> None:
        if options.wan is None:
            raise ConfigError("a WAN needs a topology file: --wan netem/us-4.toml")
        self._file = options.wan
        topology = load_topology(options.wan)
        count = options.regions if options.regions is not None else len(topology.regions)
        self.topology: Topology = topology.first(count)
        if options.has_outage and self.topology.outages:
            raise ConfigError(f"{options.wan} has a timetable of outages already; leave --outage away")
        self.choice = emulation.choose_backend(options.wan_backend)
        if options.has_outage and not self.is_emulated:
            raise ConfigError(f"--outage can't cut anything: {self.choice.why}")
        if options.has_outage and count < 3:
            raise ConfigError("--outage needs three regions: of two, neither merges without the other")
        self._state: EmulationState | None = None
        self._places: dict[str, Place] = {}
        self._pairs: list[dict[str, Any]] = []
        self._carried: dict[str, Any] = {}
        self._seed = options.seed

    @property
    def names(self) -> tuple[str, ...]:
        """The regions."""
        return self.topology.names

    @property
    def is_emulated(self) -> bool:
        """Whether there are namespaces at all."""
        return self.choice.backend != "none"

    def place(self, region: str) -> Place | None:
        """Where a region is to be started; None: in this process's own network."""
        return self._places.get(region)

    async def up(self, say: Callable[[str], None]) -> None:
        """Make it and measure it: seconds."""
        say(f"wan {self._file}: back-end {self.choice.backend}, {self.choice.why}")
        if not self.is_emulated:
            return
        self._state = await asyncio.to_thread(
            emulation.up,
            self._file,
            run=f"demo{os.getpid()}",
            choice=self.choice,
            regions=len(self.names),
            owner_pid=os.getpid(),
            starts_timetable=False,
            seed=self._seed,
        )
        self._places = {place.region: place for place in self._state.places()}
        self._pairs = await asyncio.to_thread(measure_pairs, self.topology, list(self._places.values()))
        say(f"wan measured before training: {_worst(self._pairs)}")

    async def down(self) -> None:
        """Remove it."""
        if self._state is not None:
            state, self._state = self._state, None
            with contextlib.suppress(DilocoError):
                self._carried = await asyncio.to_thread(emulation.command, state, {"do": "status"})
            await asyncio.to_thread(emulation.down, state.run)

    async def start_timetable(self) -> None:
        """The training has begun: the file's outages count from now."""
        if self.topology.outages and self._state is not None:
            await self._command("timetable")

    async def cut(self, region: str) -> None:
        """Cut a region off from all others."""
        await self._command("cut", region)

    async def heal(self, region: str) -> None:
        """And back."""
        await self._command("heal", region)

    async def _command(self, order: str, region: str = "") -> None:
        if self._state is not None:
            command = {"do": order, **({"region": region} if region else {})}
            await asyncio.to_thread(emulation.command, self._state, command)

    def report(self) -> dict[str, Any]:
        """The report's field `wan`."""
        return {
            "file": str(self._file),
            "backend": self.choice.backend,
            "why": self.choice.why,
            "pairs": self._pairs,
            "carried": {
                key: value for key, value in self._carried.items() if key not in ("pid", "log", "backend", "conditions")
            },
            "timetable": [
                {
                    "at_seconds": outage.at_ns / 1e9,
                    "seconds": outage.for_ns / 1e9,
                    "what": f"{'cut' if outage.change is None else 'degraded'} {outage.scope}",
                }
                for outage in self.topology.outages
            ],
        }


def _worst(pairs: Sequence[Mapping[str, Any]]) -> str:
    """The largest round trip and the least goodput, relative to the file's figures."""
    reachable = [pair for pair in pairs if pair["rtt_measured_ms"] is not None]
    if not reachable:
        return f"none of {len(pairs)} pairs could be measured"
    trips = max((pair["rtt_measured_ms"] / pair["rtt_ms"] - 1 for pair in reachable if pair["rtt_ms"]), default=0.0)
    goodput = min(pair["goodput_bits_per_s"] / pair["rate_bits_per_s"] for pair in reachable)
    return (
        f"in {len(reachable)} of {len(pairs)} pairs round trips are at most {trips:+.1%} off the file, goodput is at "
        f"least {goodput:.0%} of the rate"
    )


@dataclass(slots=True)
class OutageLosses:
    """Held-out losses of the regions' own parameters: the last before a heal, and one cycle after it.

    Attributes:
        cycle_steps: inner steps between two rounds of a fragment, and between two evaluations.
        before: per region (inner step, loss) when it was healed. after: likewise, as far as it is known.
    """

    cycle_steps: int
    before: dict[str, tuple[int, float]] = field(default_factory=dict)
    after: dict[str, tuple[int, float]] = field(default_factory=dict)

    def start(self, regions: Sequence[RegionProcess]) -> None:
        """The region is about to be healed."""
        self.before = {region.name: loss for region in regions if (loss := _own_loss(region)) is not None}

    @property
    def is_complete(self) -> bool:
        """Whether every region that had a loss has one of a cycle later."""
        return len(self.after) == len(self.before)

    def look(self, regions: Sequence[RegionProcess]) -> None:
        """Take what the regions show now.

        The loss that is shown was measured in the last `cycle_steps`, so after two cycles it is of one cycle later.
        """
        for region in regions:
            loss = _own_loss(region)
            if loss is None or region.name in self.after or region.name not in self.before:
                continue
            if loss[0] >= self.before[region.name][0] + 2 * self.cycle_steps:
                self.after[region.name] = loss

    def document(self) -> dict[str, Any]:
        """Fields of the report; the change is relative, and positive when the loss rose."""
        changes = [self.after[name][1] / self.before[name][1] - 1 for name in self.after]
        return {
            "val_loss_at_heal": {name: loss for name, (_, loss) in self.before.items()},
            "val_loss_one_cycle_later": {name: loss for name, (_, loss) in self.after.items()},
            "val_loss_change_worst": max(changes, default=None),
        }


@dataclass(slots=True)
class DemoOutage:
    """Outage of a region in the middle of a demo, and its effects. Run `run` beside the training.

    Attributes:
        cycle_steps: inner steps between two rounds of a fragment.
        document: the report's field `outage`; {} until the region is cut.
    """

    wan: DemoWan
    regions: Sequence[RegionProcess]
    say: Callable[[str], None]
    cycle_steps: int
    document: dict[str, Any] = field(default_factory=dict)

    async def run(self, seconds: float) -> None:
        """Wait, cut, wait, heal, and watch until the region has caught up. Cancelled when the demo ends first."""
        await asyncio.sleep(OUTAGE_FROM * seconds)
        await self._poll()
        # Not the leader: that a leader can be lost is another matter, and would hide what the cut itself costs.
        victim = next(region for region in reversed(self.regions) if region.status.get("role") != "leader")
        peers = [region for region in self.regions if region is not victim]
        self.document = {"region": victim.name}
        await self.wan.cut(victim.name)
        await self._poll()  # what was committed until the cut came into force is not the others' alone
        cut_s, steps, commits = time.monotonic(), _steps(victim), _commits(peers)
        steps_of_others = sum(map(_steps, peers))
        self.say(f"outage: {victim.name} is cut off from everyone")
        await asyncio.sleep((OUTAGE_UNTIL - OUTAGE_FROM) * seconds)
        await self._poll()
        self.document |= {
            "seconds": time.monotonic() - cut_s,
            "inner_steps": _steps(victim) - steps,
            "inner_steps_of_others": (sum(map(_steps, peers)) - steps_of_others) / len(peers),
            "commits_of_others": _commits(peers) - commits,
            "seconds_to_versions_at_heal": None,
            "seconds_to_equal_digests": None,
        }
        due = _most(peers)
        losses = OutageLosses(self.cycle_steps)
        losses.start(self.regions)
        await self.wan.heal(victim.name)
        self.say(
            f"outage: {victim.name} is back; it took {self.document['inner_steps']} steps alone, each of the others "
            f"{self.document['inner_steps_of_others']:.0f} and {self.document['commits_of_others']} rounds together"
        )
        await self._watch_return(victim, peers, due, losses)

    async def _watch_return(
        self, victim: RegionProcess, peers: Sequence[RegionProcess], due: Sequence[int], losses: OutageLosses
    ) -> None:
        """Until the region has what the others had at the heal, and then the very bytes that another one has.

        And until it is known what a cycle of training with it did to every region's loss.

        The others go on meanwhile, and are asked a moment apart: equal means that the region shows versions and digest
        that another one has shown since the heal.
        """
        healed_s = time.monotonic()
        states: set[tuple[tuple[int, ...], str]] = set()
        while self.document["seconds_to_equal_digests"] is None or not losses.is_complete:
            await self._poll()
            losses.look(self.regions)
            self.document |= losses.document()
            elapsed_s = time.monotonic() - healed_s
            states |= {state for region in peers if (state := _state(region)) is not None}
            versions = victim.status.get("versions") or []
            has_all = len(versions) == len(due) and all(
                version >= due_version for version, due_version in zip(versions, due, strict=True)
            )
            if has_all and self.document["seconds_to_versions_at_heal"] is None:
                self.document["seconds_to_versions_at_heal"] = elapsed_s
            if has_all and self.document["seconds_to_equal_digests"] is None and _state(victim) in states:
                self.document["seconds_to_equal_digests"] = elapsed_s
                self.say(f"outage: {victim.name} holds the same bytes as the others {elapsed_s:.1f} s after the heal")
            await asyncio.sleep(HEALED_POLL_S)

    async def _poll(self) -> None:
        await asyncio.gather(*(_ask_anew(region) for region in self.regions))


async def _ask_anew(region: RegionProcess) -> None:
    """Ask again where no answer came in time: figures of before a cut are not to be taken for those of after it."""
    status = region.status
    for _ in range(POLLS_MAX):
        if await region.poll() is not status:
            return


def _steps(region: RegionProcess) -> int:
    return int(region.status.get("inner_steps", 0))


def _own_loss(region: RegionProcess) -> tuple[int, float] | None:
    """The inner step, and the held-out loss of the own parameters, as last shown; None before the first."""
    loss = region.status.get("val_loss")
    return (_steps(region), float(loss)) if loss is not None else None


def _commits(regions: Sequence[RegionProcess]) -> int:
    return max(int(region.status.get("rounds_committed", 0)) for region in regions)


def _most(regions: Sequence[RegionProcess]) -> list[int]:
    """Per fragment the newest version that any of the regions has."""
    return [
        max(versions) for versions in zip(*(region.status.get("versions") or [] for region in regions), strict=True)
    ]


def _state(region: RegionProcess) -> tuple[tuple[int, ...], str] | None:
    """Versions and digest; None while the digest of the newest version is not computed yet."""
    digest = region.status.get("digest")
    return (tuple(region.status["versions"]), digest) if digest is not None else None


def wan_lines(report: dict[str, Any]) -> list[str]:
    """The fields `wan` and `outage` for people."""
    wan, outage = report["wan"], report["outage"]
    lines = [f"wan                back-end {wan['backend']}: {wan['why']}"]
    lines += map(pair_line, wan["pairs"])
    if outage:
        after = outage["seconds_to_equal_digests"]
        lines.append(
            f"outage             {outage['region']} cut off for {outage['seconds']:.1f} s: "
            f"{outage['inner_steps']} steps of its own, {outage['commits_of_others']} rounds of the others, "
            + ("not equal again in time" if after is None else f"the same bytes {after:.1f} s after the heal")
        )
        worst = outage.get("val_loss_change_worst")
        if worst is not None:
            lines.append(f"                   held-out loss one cycle after the heal: {worst:+.1%} in the worst region")
    return lines

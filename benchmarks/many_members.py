"""Control messages of a run with many members, by the simulator's virtual time: the real cores, and encoded frames.

    python benchmarks/many_members.py [--members 8,32,64] [--voters 5] [--seconds 8] [--json]

Steps take 100 ms, H = 8, P = 4, heartbeats and elections as by default; 20 ms one way, no loss. The founders are the
voters. All others are added as contributors, start at once, and then it is measured. Tensors are a few hundred values,
so bytes of bulk transfers mean nothing here. What is counted is what each member sends in control frames.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.merge.fragments import build_manifest
from diloco_node.core.operator_orders import EntryOrdered
from diloco_node.core.types import CarryMode, RoundBody, RunSettings
from diloco_node.lab.sim import simulation
from diloco_node.lab.sim.fake_tensors import FragmentLayout
from diloco_node.lab.sim.planting import signed
from diloco_node.lab.sim.setup import Setup, draw_setup
from diloco_node.lab.sim.world import MS, SECOND, FakeLink

SEED = 1
PATIENCE_S = 30
SETTLE_S = 6
"""From the start of all joiners until it is measured: the rounds tell whether all are in them by then."""

USUAL = RunSettings()


class ManyMembers:
    """A simulated run of so many members, the first of them voters."""

    def __init__(self, members: int, voters: int) -> None:
        names = tuple(f"m{number:02d}" for number in range(members))

        def setup(rng: Any, *_: int) -> Setup:
            drawn = draw_setup(rng, 5)
            manifest = build_manifest(drawn.manifest.tensors[:4], 4)
            return replace(
                drawn,
                regions=names,
                joiners=names[voters:],
                settings=replace(
                    drawn.settings,
                    fragments=4,
                    sync_every=8,
                    quorum_min=0,
                    carry=CarryMode.CARRY,
                    rounds_in_flight_max=2,
                    heartbeat_ns=USUAL.heartbeat_ns,
                    election_timeout_ns=USUAL.election_timeout_ns,
                    ballot_deadline_min_ns=USUAL.ballot_deadline_min_ns,
                    summary_entries=USUAL.summary_entries,
                ),
                manifest=manifest,
                layouts=tuple(FragmentLayout.of(fragment.piece_sizes) for fragment in manifest.fragments),
                step_ns_min=100 * MS,
                step_ns_max=100 * MS,
                is_theta_shared=True,
            )

        def links(_: object, setup: Setup) -> dict[tuple[str, str], FakeLink]:
            pairs = ((source, target) for source in setup.regions for target in setup.regions if source != target)
            return {pair: FakeLink(20 * MS, MS, 0.0, 0.0, 20_000_000) for pair in pairs}

        with patch.object(simulation, "draw_setup", setup), patch.object(simulation, "draw_links", links):
            self.sim = simulation.Simulation(SEED)
        self.frames: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        send = self.sim.network.send

        def count(source: str, target: str, frame: bytes) -> None:
            self.frames[source] += 1
            self.bytes[source] += len(frame)
            send(source, target, frame)

        patch.object(self.sim.network, "send", count).start()

    def go(self, seconds: float) -> None:
        """Let time pass. Raises RuntimeError: a rule of the system is broken."""
        until_ns = self.sim.world.now_ns + int(seconds * SECOND)
        self.sim.run_until(lambda: self.sim.world.now_ns > until_ns)
        if self.sim.checkers.violations:
            raise RuntimeError(self.sim.checkers.violations[0])

    def grow(self) -> None:
        """Have everybody join. Raises RuntimeError: somebody could not."""
        self.sim.start()
        self.go(6)
        for name in self.sim.setup.joiners:
            end_ns = self.sim.world.now_ns + PATIENCE_S * SECOND
            while not self._is_member(name):
                if self.sim.world.now_ns > end_ns:
                    raise RuntimeError(f"{name} is no member after {PATIENCE_S} s")
                self._order(name)
                self.go(0.3)
        for name in self.sim.setup.joiners:  # all at once: a second with all members costs many with few
            self.sim.start_region(name)
            self.sim.honest[name] = self.sim.hosts[name]
        self.go(SETTLE_S)

    def _leader(self) -> Any:
        cores = (host.core for host in self.sim.hosts.values() if host.core is not None)
        return next((core for core in cores if core.ledger.is_leader), None)

    def _is_member(self, name: str) -> bool:
        leader = self._leader()
        return leader is not None and name in leader.history.roster.names

    def _order(self, name: str) -> None:
        leader = self._leader()
        if leader is not None:
            body = signed(leader.ledger.disks.roster, MembershipBody(name, "contributor"))
            host = next(host for host in self.sim.hosts.values() if host.core is leader)
            host.post(EntryOrdered(body, is_cut_off=False, is_forced=False))

    def measure(self, seconds: float) -> dict[str, Any]:
        """Count for a while."""
        self.frames.clear()
        self.bytes.clear()
        entries = len(self.sim.checkers.history)
        self.go(seconds)
        bodies = [entry.body for entry in self.sim.checkers.history[entries:]]
        rounds = [body for body in bodies if isinstance(body, RoundBody)]
        leader = self._leader()
        voters = set(self.sim.setup.founders)
        leading = {name for name, host in self.sim.hosts.items() if host.core is leader}
        groups = {"leader": leading, "voter": voters - leading, "contributor": set(self.sim.setup.joiners)}
        return {
            "members": len(self.sim.setup.regions),
            "rounds_per_minute": len(rounds) * 60 / seconds,
            "members_in_a_round": statistics.fmean(len(body.members) for body in rounds) if rounds else 0.0,
            "messages_per_s": _means(self.frames, groups, seconds),
            "bytes_per_s": _means(self.bytes, groups, seconds),
        }


def _means(counts: Counter[str], groups: dict[str, set[str]], seconds: float) -> dict[str, float | None]:
    return {
        kind: statistics.fmean(counts[name] for name in names) / seconds if names else None
        for kind, names in groups.items()
    }


def measure(members: Sequence[int], voters: int, seconds: float) -> Iterator[dict[str, Any]]:
    """One row for each number of members, as soon as it is there."""
    for count in members:
        begin_s = time.monotonic()
        run = ManyMembers(count, min(voters, count))
        run.grow()
        yield run.measure(seconds) | {"took_s": time.monotonic() - begin_s}


def main() -> int:
    """Run them and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", default="8,32,64", help="how many, with commas [8,32,64]")
    parser.add_argument("--voters", type=int, default=5, help="of them [5]")
    parser.add_argument("--seconds", type=float, default=8.0, help="of virtual time [8]")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    arguments = parser.parse_args()
    for row in measure([int(word) for word in arguments.members.split(",")], arguments.voters, arguments.seconds):
        if arguments.json:
            print(json.dumps(row), flush=True)
            continue
        print(
            f"{row['members']} members: {row['rounds_per_minute']:.0f} rounds a minute, "
            f"{row['members_in_a_round']:.1f} members in each"
        )
        for kind, messages in row["messages_per_s"].items():
            if messages is not None:
                print(f"  {kind:<12}{messages:8.1f} messages/s {row['bytes_per_s'][kind] / 1000:8.1f} kB/s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

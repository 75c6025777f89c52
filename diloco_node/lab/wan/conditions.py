"""Present state of the links: the topology, with cuts and changes on top. Pure; router and containers obey it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco_node.lab.wan.topology import Outage, Path, PathChange, Scope, Topology


class Conditions:
    """Cuts and changes in force. Overlapping ones are independent: a path is whole when no cut covers it any more."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._cuts: dict[Scope, None] = {}
        self._changes: dict[Scope, PathChange] = {}

    def cut(self, scope: Scope) -> None:
        """Let nothing pass there; again: no difference. Raises ConfigError: a region is not in the topology."""
        self._check(scope)
        self._cuts[scope] = None

    def change(self, scope: Scope, change: PathChange) -> None:
        """Degrade (or improve) paths; a later change of the same scope replaces the earlier one.

        Raises ConfigError: a region is not in the topology.
        """
        self._check(scope)
        self._changes[scope] = change

    def heal(self, scope: Scope) -> int:
        """Take cuts and changes back.

        scope: a region alone takes back everything that names it, at either end; else exactly this scope.

        Returns: how many were taken back; 0 when there were none.

        Raises ConfigError: a region is not in the topology.
        """
        self._check(scope)
        is_whole = scope == Scope(scope.region)
        count = 0
        for table in (self._cuts, self._changes):
            for key in list(table):
                if key == scope or (is_whole and scope.region in (key.region, key.other)):
                    del table[key]
                    count += 1
        return count

    def end(self, scope: Scope, *, is_cut: bool) -> None:
        """Take back exactly one cut or change, as the timetable does; nothing when it is not in force."""
        if is_cut:
            self._cuts.pop(scope, None)
        else:
            self._changes.pop(scope, None)

    def path(self, source: str, destination: str) -> Path | None:
        """Return the path as it is now; None: cut. Later changes come on top of earlier ones."""
        pair = (source, destination)
        if any(pair in scope.pairs(self.topology.names) for scope in self._cuts):
            return None
        path = self.topology.paths[pair]
        for scope, change in self._changes.items():
            if pair in scope.pairs(self.topology.names):
                path = change.apply(path)
        return path

    def lines(self) -> list[str]:
        """Return cuts and changes in force, in words, for `wan status`."""
        return [f"cut {scope}" for scope in self._cuts] + [f"changed {scope}" for scope in self._changes]

    def _check(self, scope: Scope) -> None:
        self.topology.region(scope.region)
        if scope.other:
            self.topology.region(scope.other)


@dataclass(frozen=True, slots=True)
class _Step:
    at_ns: int
    is_start: bool
    outage: Outage


class Timetable:
    """The outages of a file on a clock. `wake_at_ns` says when `advance` is next due; None when nothing is left.

    outages: by their start. started_ns: monotonic, what the file's times count from.
    """

    def __init__(self, outages: Sequence[Outage], *, started_ns: int) -> None:
        steps = [_Step(started_ns + outage.at_ns, True, outage) for outage in outages]
        steps += [_Step(started_ns + outage.at_ns + outage.for_ns, False, outage) for outage in outages]
        # At one instant ends come first: an outage that follows another of the same scope is not taken back by it.
        self._steps = sorted(steps, key=lambda step: (step.at_ns, step.is_start))

    @property
    def wake_at_ns(self) -> int | None:
        """When the next outage begins or ends."""
        return self._steps[0].at_ns if self._steps else None

    def advance(self, conditions: Conditions, *, now_ns: int) -> list[str]:
        """Carry out what is due; a line for each."""
        lines = []
        while self._steps and self._steps[0].at_ns <= now_ns:
            step = self._steps.pop(0)
            outage = step.outage
            if not step.is_start:
                conditions.end(outage.scope, is_cut=outage.change is None)
            elif outage.change is None:
                conditions.cut(outage.scope)
            else:
                conditions.change(outage.scope, outage.change)
            verb = "cut" if outage.change is None else "degraded"
            lines.append(f"{outage.scope}: {verb if step.is_start else 'healed'}")
        return lines

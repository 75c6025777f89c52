"""The rows of the data, followed from above: none is merged twice, and each before a shard's position was trained.

It knows what each learner has really trained in each step, and takes nothing from `core.ledger.shard_account` but the
positions at the end. A row that was trained and is in no merge was booked as discarded with its steps: `audit` sees to
that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from diloco_node.core.data_shards import SHARDS, ShardRows
from diloco_node.core.types import RoundBody

if TYPE_CHECKING:
    from diloco_node.lab.sim.host import Host

Row = tuple[int, int]
"""Shard, and the row's number over all passes."""


class RowCheck:
    """Follows learners and the committed history."""

    def __init__(self, fragments: int, violate: Callable[[str], None]) -> None:
        # By learner and incarnation, the rows of each step.
        self._steps: dict[tuple[str, int], list[list[Row]]] = {}
        self._trained: set[Row] = set()
        # Per fragment, whose contribution brought a row.
        self._merged: list[dict[Row, str]] = [{} for _ in range(fragments)]
        self._violate = violate

    def trained(self, learner: str, incarnation: int, ranges: Iterable[ShardRows]) -> None:
        """Note the rows of a learner's next step."""
        rows = [(item.shard, row) for item in ranges for row in range(item.start, item.stop)]
        self._steps.setdefault((learner, incarnation), []).append(rows)
        self._trained.update(rows)

    def committed(self, body: RoundBody, hosts: Mapping[str, Host], liars: frozenset[str]) -> None:
        """Take a committed round.

        Regions that lost their folders lost what their learners had named. They may train a row again that was on its
        way just then.
        """
        losers = liars | {name for name, host in hosts.items() if host.disk.lost is not None}
        sources = self._merged[body.fragment]
        for contribution in (member.contribution for member in body.members):
            learner = contribution.learner
            steps = self._steps.get((learner, contribution.incarnation), [])
            for rows in steps[contribution.step_from : contribution.step_to]:
                for row in rows:
                    source = sources.get(row)
                    sources[row] = learner
                    if source is not None and not losers & {source, learner}:
                        self._violate(
                            f"rows: row {row[1]} of shard {row[0]} is merged from {source} and from {learner} "
                            f"in {body.fragment}/{body.version}"
                        )

    def close(self, hosts: Mapping[str, Host]) -> None:
        """At rest: each row before the position of its shard was trained."""
        for name in sorted(hosts):
            core = hosts[name].core
            if core is None:
                continue
            for shard in range(SHARDS):
                for row in range(core.history.account.shards.position(shard)):
                    if (shard, row) not in self._trained:
                        self._violate(f"rows: nobody trained row {row} of shard {shard}, {name} holds it for merged")

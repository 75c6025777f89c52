"""Owners of the shards of the data, and how far these are trained, by the ledger: a part of the account.

A contribution says which rows its steps trained (`core.data_shards.TrainedRows`). So the position of a shard is
committed with the round, and one life of one learner holds a shard: whoever comes next begins where that one's merged
rows end. Rows behind the position are merged, or carried, or booked as discarded with their steps; no row is given
twice for them.

A change of the members gives a shard to another region. Its owner until then may not have heard, and have rows on the
way. So the new owner waits until each owner before has said in a merged contribution that it goes by the members as
they are now, or is no member any more, or is expelled, or counts no rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from diloco_node.core.data_shards import ShardRows, TrainedRows, shard_owners
from diloco_node.core.ledger.roster import Roster
from diloco_node.core.ledger.summary import RunSummary, ShardLife, ShardLines, ShardWait, summed_roster
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.types import Contribution, DiskNamedBody, Entry, GenesisBody

K = TypeVar("K")
V = TypeVar("V")

WAITING: Final = -1
"""In place of a position: an owner before may train the shard still."""

ADVANCE_MAX: Final = 1 << 32
"""Rows of a shard that one contribution may add: no learner trains as many between two merges."""


@dataclass(frozen=True, slots=True)
class ShardHolder:
    """The life that trained a shard last: of its rows up to `stop`, those up to `start` are of lives before."""

    learner: str
    incarnation: int
    start: int
    stop: int


def put(table: dict[K, V], key: K, value: V | None) -> None:
    """Set a key of a table; None removes it."""
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value


class ShardAccount:
    """Owners and positions of the shards. set_key: as `put`, so that it can be taken back with the entry."""

    def __init__(self, set_key: Callable[[dict[Any, Any], Any, Any], None]) -> None:
        self._put = set_key
        self._run_id = ""
        # With one key, so that it can be taken back; empty before genesis.
        self._rosters: dict[str, Roster] = {}
        self._holders: dict[int, ShardHolder] = {}
        # shard -> regions that owned it before and may train it still; never the owner now.
        self._waits: dict[int, frozenset[str]] = {}

    @property
    def is_counted(self) -> bool:
        """Whether any region counts the rows that it trains."""
        return bool(self._holders)

    def position(self, shard: int) -> int:
        """Rows of a shard that are merged in a fragment, over all passes."""
        return self._holders[shard].stop if shard in self._holders else 0

    def waiting(self) -> dict[str, int]:
        """By region, how many shards wait until it has said that it heard of the change that took them."""
        return dict(Counter(name for names in self._waits.values() for name in names))

    def starts(self, region: str, incarnation: int, shards: tuple[int, ...]) -> tuple[int, ...]:
        """The position at which this life of a region's learner begins each of its shards; or WAITING."""
        starts = dict.fromkeys(shards, 0)
        for shard in starts.keys() & self._holders.keys():
            holder = self._holders[shard]
            is_own = (holder.learner, holder.incarnation) == (region, incarnation)
            starts[shard] = holder.start if is_own else holder.stop
        for shard in starts.keys() & self._waits.keys():
            if self._waits[shard] != {region}:
                starts[shard] = WAITING
        return tuple(starts.values())

    def take(self, entry: Entry) -> None:
        """Take the next entry, before its contributions are taken."""
        body = entry.body
        if isinstance(body, GenesisBody):
            self._run_id = body.run_id
            self._put(self._rosters, "now", Roster().after(entry))
        elif isinstance(body, MembershipBody | DiskNamedBody) and self._rosters:
            before = self._rosters["now"]
            after = before.after(entry)
            self._put(self._rosters, "now", after)
            if after.names and after.names != before.names:
                self._hand_over(before, after)
            if body.region in after.expelled:
                self._release(body.region)

    def _table(self, roster: Roster) -> tuple[str, ...]:
        """The owner of each shard."""
        return shard_owners(self._run_id, roster.names)

    def _hand_over(self, before: Roster, after: Roster) -> None:
        names = after.disks.keys() - after.expelled
        for shard, (former, owner) in enumerate(zip(self._table(before), self._table(after), strict=True)):
            waits = self._waits.get(shard, frozenset())
            if former == owner and owner not in waits and waits <= names:
                continue
            waits_after = ((waits | {former}) if former != owner else waits) & names - {owner}
            if waits_after != waits:
                self._put(self._waits, shard, waits_after or None)

    def include(self, contribution: Contribution) -> None:
        """Take a contribution of a committed round."""
        if not contribution.rows:
            self._release(contribution.learner)
            return
        rows, roster = TrainedRows.unpacked(contribution.rows), self._rosters["now"]
        table = self._table(roster)
        for item in rows.ranges:
            holder, owner = self._holders.get(item.shard), table[item.shard]
            if item.start == item.stop and not self._may_train(contribution.learner, item.shard, owner):
                continue  # a word about a shard that was given up long ago
            if holder is not None and item.stop <= holder.stop:
                continue
            is_own = holder is not None and (holder.learner, holder.incarnation) == _life(contribution)
            start = holder.start if is_own and holder is not None else item.start
            self._put(self._holders, item.shard, ShardHolder(*_life(contribution), start, item.stop))
        if rows.changes == roster.changes:
            self._release(contribution.learner)

    def _may_train(self, region: str, shard: int, owner: str) -> bool:
        """Whether the shard is the region's, or was and it may not have heard."""
        return region == owner or region in self._waits.get(shard, frozenset())

    def _release(self, region: str) -> None:
        for shard in [shard for shard, names in self._waits.items() if region in names]:
            self._put(self._waits, shard, (self._waits[shard] - {region}) or None)

    def fault(self, contribution: Contribution) -> str:
        """Return why merging these rows would train some twice, or others' rows; empty if they may be merged."""
        if not contribution.rows:
            return ""
        name = contribution.learner
        try:
            rows = TrainedRows.unpacked(contribution.rows)
        except ValueError as error:
            return f"rows of {name}: {error}"
        if self.is_ahead(contribution):
            return f"{name} goes by change {rows.changes} of the members, which has not been made"
        table = self._table(self._rosters["now"])
        faults = (self._range_fault(contribution, item, table[item.shard]) for item in rows.ranges)
        return next((fault for fault in faults if fault), "")

    def is_ahead(self, contribution: Contribution) -> bool:
        """Whether a contribution goes by a change of the members that is not made here: it may be made elsewhere."""
        roster = self._rosters.get("now")
        return bool(contribution.rows) and (roster is None or contribution.rows[0] > roster.changes)

    def conflict(self, contribution: Contribution, rival: Contribution) -> str:
        """Return why a contribution can't be merged beside a rival, whichever is first; empty if it can."""
        shards = set(contribution.rows[1::3])
        if contribution.learner != rival.learner and shards.isdisjoint(rival.rows[1::3]):
            return ""
        fault = self._after(rival).fault(contribution) or self._after(contribution).fault(rival)
        return fault and f"beside what {rival.learner} has in the merge of fragment {rival.fragment}: {fault}"

    def _after(self, contribution: Contribution) -> ShardAccount:
        """The account if this was committed."""
        after = ShardAccount(put)
        after._run_id, after._rosters = self._run_id, self._rosters
        after._holders, after._waits = dict(self._holders), dict(self._waits)
        after.include(contribution)
        return after

    def _range_fault(self, contribution: Contribution, item: ShardRows, owner: str) -> str:
        holder, name = self._holders.get(item.shard), contribution.learner
        is_own = holder is not None and (holder.learner, holder.incarnation) == _life(contribution)
        # A position only grows: one that nobody can reach would end the shard for all who come after.
        if item.stop - self.position(item.shard) > ADVANCE_MAX:
            return f"{name} is {item.stop - self.position(item.shard)} rows ahead of the run in shard {item.shard}"
        # Rows from before the holder had the shard may be merged late, also its own, if the shard has moved and come
        # back. Without rows it is a word of a region that had it; of one that may not train it, it changes nothing.
        if item.start == item.stop or (holder is not None and item.stop <= holder.start):
            return ""
        if item.stop > self.position(item.shard) and not self._may_train(name, item.shard, owner):
            return f"{name} trains shard {item.shard} of the data, which is {owner}'s"
        least = 0 if holder is None else holder.start if is_own else holder.stop
        if item.start < least:
            return f"{name} goes back to row {item.start} of shard {item.shard}, which is trained up to {least}"
        return ""

    def drop_unused(self) -> None:
        """Forget who waits for whom where nobody counts rows. Every region must do it after the same entries."""
        if not self._holders:
            for shard in list(self._waits):
                self._put(self._waits, shard, None)

    def lines(self) -> tuple[ShardLines, ...]:
        """For a summary: none where nobody counts rows."""
        lives: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
        for shard, holder in sorted(self._holders.items()):
            lives.setdefault((holder.learner, holder.incarnation), []).append((shard, holder.start, holder.stop))
        waits: dict[str, list[int]] = {}
        for shard, names in sorted(self._waits.items()):
            for name in names:
                waits.setdefault(name, []).append(shard)
        lines = ShardLines(
            tuple(ShardLife(*life, *zip(*columns, strict=True)) for life, columns in sorted(lives.items())),
            tuple(ShardWait(name, tuple(waits[name])) for name in sorted(waits)),
        )
        return (lines,) if lives else ()

    def restore(self, summary: RunSummary) -> None:
        """Go on from a summary."""
        if summary.genesis:
            self._run_id, self._rosters = summary.genesis[0].run_id, {"now": summed_roster(summary)}
        self._holders = {
            shard: ShardHolder(line.learner, line.incarnation, start, stop)
            for lines in summary.shards
            for line in lines.lives
            for shard, start, stop in zip(line.shards, line.starts, line.stops, strict=True)
        }
        waits: dict[int, frozenset[str]] = {}
        for wait in (wait for lines in summary.shards for wait in lines.waits):
            for shard in wait.shards:
                waits[shard] = waits.get(shard, frozenset()) | {wait.learner}
        self._waits = waits


def _life(contribution: Contribution) -> tuple[str, int]:
    return contribution.learner, contribution.incarnation

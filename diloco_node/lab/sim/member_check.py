"""The members of a simulated run, followed from above: who may count, who may be merged, how changes follow each other.

It shares nothing with `core.ledger.roster`. It reads the committed entries, and for a core that leads those of its log.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.membership import absence
from diloco_node.core.types import EVICTED, DiskNamedBody, EntryBody, GenesisBody, RoundBody

Kinds = dict[str, str]
"""By member, "voter", "contributor", "witness" or "evicted" (a voter whose vote is taken); who left is not there."""

VOTING = ("voter", "evicted")
VOTERS_LEFT_MIN = 3


class MemberCheck:
    """Follows the committed history.

    Attributes:
        kinds: of the members, by the committed entries. former: regions that were members.
        has_been_alone: there was a single member, which sends nobody what it opens.
    """

    def __init__(self, founders: Iterable[str], violate: Callable[[str], None]) -> None:
        self.kinds: Kinds = dict.fromkeys(founders, "voter")
        self.former: set[str] = set()
        self.has_been_alone = len(self.kinds) == 1
        # Regions whose folder an entry names since they were added.
        self._named = set(self.kinds)
        # By region, when a leader last put into its log that it was away for long.
        self._evicted_ns: dict[str, int] = {}
        self._violate = violate

    def committed(self, body: EntryBody, leader: str = "") -> None:
        """Take a committed entry. leader: of its term, if one is known."""
        if leader and self.kinds.get(leader) != "voter":
            self._violate(f"members: {leader} goes on to lead as {self.kinds.get(leader, 'no member')}: {body}")
        if isinstance(body, RoundBody):
            names = {member.contribution.learner for member in body.members}
            names |= {stripe.reducer for stripe in body.stripes}
            if strangers := sorted(names - self.kinds.keys()):
                self._violate(f"members: {body.fragment}/{body.version} is of {strangers}, of whom the run has none")
        elif isinstance(body, DiskNamedBody) and body.disk == EVICTED:
            voters = [name for name, kind in self.kinds.items() if kind == "voter" and name != body.region]
            if len(voters) < VOTERS_LEFT_MIN or self.kinds.get(body.region) != "voter":
                self._violate(f"members: {body} leaves {voters}, of {self.kinds}")
        elif isinstance(body, DiskNamedBody) and body.disk:
            self._named.add(body.region)
        elif isinstance(body, MembershipBody):
            self._check_change(body)
        _take(self.kinds, body)
        self.has_been_alone |= len(self.kinds) == 1

    def _check_change(self, body: MembershipBody) -> None:
        before = self.kinds.get(body.region)
        if before is None:
            self._named.discard(body.region)
        if body.kind == "voter" and (before != "contributor" or body.region not in self._named):
            self._violate(f"members: {body} gives a vote to who has not shown that it holds the state")
        if before is None and body.kind not in ("contributor", "witness"):
            self._violate(f"members: {body} is of no member")
        (self.former.add if body.kind == "former" else self.former.discard)(body.region)

    def check_leader(self, core: Any, index: int) -> None:
        """A leader has one change of the members open at a time. index: entries that are committed."""
        changes = [body for body in _open_bodies(core, index) if isinstance(body, MembershipBody)]
        if len(changes) > 1:
            self._violate(f"members: {len(changes)} changes are open at once: {changes}")

    def is_belated(self, text: str, *, now_ns: int) -> bool:
        """Whether an alarm is about an eviction that was true, and waited for a majority.

        Its region may be back, and knows that it is here. Others may have heard it again for as long as an absence has
        to last: nobody can tell that from what a liar dates back."""
        if match := re.search(r"(\S+) is away for long", text):
            self._evicted_ns[match[1]] = now_ns
        match = re.search(r"entry \d+: (\S+) (was heard here|is here itself)", text)
        if match is None or match[1] not in self._evicted_ns:
            return False
        return match[2] == "is here itself" or now_ns - self._evicted_ns[match[1]] >= absence.EVICT_AFTER_NS

    def is_majority(self, core: Any, names: Iterable[str], index: int) -> bool:
        """Whether these are a majority of those who vote by the log of a core.

        Args:
            index: of the last entry that `committed` has taken.
        """
        kinds = dict(self.kinds)
        for body in _open_bodies(core, index):
            _take(kinds, body)
        return _is_majority(kinds, names)

    def is_agreed(self, core: Any, names: Iterable[str], index: int) -> bool:
        """Whether these are a majority by the committed entries, or by the log: what an entry tells of the others need
        not know of a change that is not committed yet."""
        return _is_majority(self.kinds, names) or self.is_majority(core, names, index)


def _is_majority(kinds: Kinds, names: Iterable[str]) -> bool:
    voters = {name for name, kind in kinds.items() if kind in ("voter", "witness")}
    return 2 * len(voters & set(names)) > len(voters)


def _open_bodies(core: Any, index: int) -> list[EntryBody]:
    last, base = core.ledger.last_index, core.ledger.base.index
    return [core.ledger.entry(at).body for at in range(max(index, base) + 1, last + 1)]


def _take(kinds: Kinds, body: EntryBody) -> None:
    if isinstance(body, GenesisBody):
        kinds.clear()
        kinds.update(dict.fromkeys(body.regions, "voter"))
    elif isinstance(body, MembershipBody) and body.kind == "former":
        kinds.pop(body.region, None)
    elif isinstance(body, MembershipBody):
        kinds[body.region] = body.kind
    elif isinstance(body, DiskNamedBody) and body.disk and kinds.get(body.region) in VOTING:
        kinds[body.region] = "evicted" if body.disk == EVICTED else "voter"

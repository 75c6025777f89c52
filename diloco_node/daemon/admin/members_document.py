"""The members of the run for people, and an operator's change of them as it comes from the admin port."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from diloco_node.core.bounds import ADDRESS_BYTES
from diloco_node.core.ledger.disks import DiskView
from diloco_node.core.ledger.roster import KINDS, Roster
from diloco_node.core.member_kind import MemberKind, Membership, MembershipBody
from diloco_node.core.membership.member_change import tolerance
from diloco_node.core.operator_orders import EntryOrdered
from diloco_node.core.shapes import REGION_PATTERN
from diloco_node.core.types import EVICTED, EXPELLED
from diloco_node.errors import ConfigError

NEWEST_ENTRIES: Final = 16
"""A change of the members further back in the log happened before this region caught up: nobody here saw when."""


@dataclass(frozen=True, slots=True)
class MemberSigns:
    """Signs of the members beside those of the ledger.

    Attributes:
        region: this one. heard: the others whose heartbeats arrive, and the witness if its bucket answers.
        reported: the others that those hear. linked: the others that have a link now, so their certificate is good.
        held_bytes, state_bytes: of parameters and momentum, what this region holds, and all.
        since_unix: by region, when this daemon saw the entry of its kind. shards: by region, how many wait for it.
        witness_fault: why its bucket does not answer; or empty. catch_up: how far this region is behind; or empty.
    """

    region: str
    heard: frozenset[str] = frozenset()
    linked: frozenset[str] = frozenset()
    held_bytes: int = 0
    state_bytes: int = 0
    since_unix: Mapping[str, float] = field(default_factory=dict)
    shards: Mapping[str, int] = field(default_factory=dict)
    witness_fault: str = ""
    catch_up: str = ""
    is_over: bool = False
    reported: frozenset[str] = frozenset()

    @property
    def there(self) -> frozenset[str]:
        """The regions that are there."""
        return self.heard | {self.region} | self.reported


class MemberDates:
    """When the members got their kinds, as this daemon saw it. since_unix: see `MemberSigns`."""

    def __init__(self, roster: Roster) -> None:
        self.since_unix: dict[str, float] = {}
        self._roster = roster

    def follow(self, roster: Roster, last_index: int, unix_s: Callable[[], float]) -> None:
        """Date what is new in a roster, if its entry is new in a log with this end. unix_s: the wall clock."""
        if roster is self._roster:
            return
        before, self._roster = self._roster, roster
        for name, line in roster.memberships.items():
            if name in before.memberships and before.memberships[name].since == line.since:
                continue
            self.since_unix.pop(name, None)
            if line.since > last_index - NEWEST_ENTRIES:
                self.since_unix[name] = unix_s()


def members_document(disks: DiskView, signs: MemberSigns) -> dict[str, Any]:
    """The members by the log, and what the run can bear."""
    roster = disks.roster
    return {
        "changes": roster.changes,
        "tolerance": _tolerance(disks, signs),
        "rows": [
            {
                "region": name,
                "kind": line.kind,
                "since": line.since,
                "since_unix": signs.since_unix.get(name),
                "address": line.address,
                "counts": name in roster.voters,
                "has_folder": bool(disks.disk_of(name)),
                "is_there": name in signs.there,
                "state": _state(name, line, signs, has_folder=bool(disks.disk_of(name))) + _waits(name, signs),
            }
            for name, line in roster.memberships.items()
        ],
    }


def _tolerance(disks: DiskView, signs: MemberSigns) -> str:
    if not disks.has_view:
        return "the run has not begun"
    if signs.is_over:
        return "the run is finished: nothing is merged any more"
    return f"{tolerance(disks.roster, signs.there)}; training goes on in each region"


def _state(name: str, line: Membership, signs: MemberSigns, *, has_folder: bool) -> str:
    """Say whether a member is there, and what it waits for."""
    if line.kind == MemberKind.FORMER:
        return "removed"
    if line.kind == MemberKind.WITNESS:
        fault = f"away: {signs.witness_fault}" if signs.witness_fault else "there"
        return fault if has_folder else f"{fault}; no vote until both regions have its object in their log"
    if line.disk == EXPELLED:
        return "expelled, until `diloco-node quarantine lift`"
    if line.disk == EVICTED and name not in signs.there:
        return "away too long: it has no vote until it is back"
    if not has_folder and line.since:  # before genesis no folder counts
        return _lack(name, signs)
    there = "there, ready for a vote" if line.kind == MemberKind.CONTRIBUTOR else "there"
    if name not in {*signs.heard, signs.region}:
        there = f"there, but not heard by {signs.region}"
    return there if name in signs.there else "away"


def _waits(name: str, signs: MemberSigns) -> str:
    shards = signs.shards.get(name, 0)
    return f"; {shards} shards wait for {name}, until it has heard of the change that took them" if shards else ""


def _lack(name: str, signs: MemberSigns) -> str:
    """Say what is still to come of a member whose folder does not count."""
    behind = f"; {signs.catch_up}" if name == signs.region and signs.catch_up else ""
    if name == signs.region and signs.held_bytes < signs.state_bytes:
        return f"fetches the model: {signs.held_bytes / 1e6:,.1f} of {signs.state_bytes / 1e6:,.1f} MB{behind}"
    if name in signs.there:
        return f"there, waits until its disk holds what is committed{behind}"
    if name in signs.linked:
        return "its certificate is good, waits for its first heartbeat"
    return "away, waits for a link with its certificate"


def member_order(
    document: Mapping[str, Any], roster: Roster, addresses: Mapping[str, str | None] = MappingProxyType({})
) -> EntryOrdered:
    """The order in a request. addresses: where each member is dialed. Raises ConfigError: why it can't be."""
    region, kind, signature = (document.get(key) for key in ("region", "kind", "signature"))
    if not isinstance(region, str) or REGION_PATTERN.fullmatch(region) is None or kind not in KINDS:
        raise ConfigError(f"the body must name a region, and its kind: {', '.join(sorted(KINDS))}")
    try:
        octets = bytes.fromhex(signature if isinstance(signature, str) else "?")
    except ValueError:
        raise ConfigError("the signature must be a text of hexadecimal digits") from None
    if (address := document.get("address")) is not None and kind == MemberKind.WITNESS:
        _check_bucket(address)
    elif address is not None:
        _check_new(region, address, roster, addresses)
    if document.get("changes", roster.changes + 1) != roster.changes + 1:
        raise ConfigError("the members were changed meanwhile: look at `diloco-node members list`, and order it again")
    body = MembershipBody(region, MemberKind(kind).value, address or "", octets)
    return EntryOrdered(body, is_cut_off=kind == MemberKind.FORMER, is_forced=document.get("force") is True)


def _check_bucket(url: Any) -> None:
    """Refuse a witness that is no bucket. Raises ConfigError."""
    from diloco_node.storage.object_store import bucket_scheme

    if not isinstance(url, str) or len(url) > ADDRESS_BYTES:
        raise ConfigError(f"a witness has the URL of a bucket, of at most {ADDRESS_BYTES} characters")
    bucket_scheme(url)


def _check_new(region: str, address: Any, roster: Roster, addresses: Mapping[str, str | None]) -> None:
    """Refuse a member that is there, or has another's address (empty: nobody can dial it). Raises ConfigError."""
    from diloco_node.config.field_types import host_port_of  # brings pydantic, which the daemon else does without

    if (kind := roster.kind_of(region)) is not MemberKind.FORMER:
        place = addresses.get(region) or "an address that is not known here"
        raise ConfigError(f"{region} is a {kind} already, at {place}: to move it, remove it first and add it again")
    if address == "":
        if hidden := [name for name in roster.names if not addresses.get(name)]:
            raise ConfigError(
                f"nobody can dial {hidden[0]}, so {region} must be dialable: give --address, where the others dial it"
            )
        return
    try:
        host_port_of(address)
    except ValueError as error:
        raise ConfigError(f"the address {address!r}: {error}") from None
    if owner := next((name for name in roster.names if addresses.get(name) == address), ""):
        raise ConfigError(f"{address} is the address of {owner}: give that of {region}")

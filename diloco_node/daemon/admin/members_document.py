"""The members of the run for people, and an operator's change of them as it comes from the admin port."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from diloco_node.core.bounds import ADDRESS_BYTES
from diloco_node.core.ledger.disks import DiskView
from diloco_node.core.ledger.roster import KINDS, Roster
from diloco_node.core.member_kind import MemberKind, MembershipBody
from diloco_node.core.membership.member_change import tolerance
from diloco_node.core.operator_orders import EntryOrdered
from diloco_node.core.shapes import REGION_PATTERN
from diloco_node.errors import ConfigError


def members_document(disks: DiskView, there: frozenset[str], witness_fault: str = "") -> dict[str, Any]:
    """The members by the log, and what the run can bear.

    Args:
        there: the regions that are there, this one too. witness_fault: why the witness does not answer here.
    """
    roster = disks.roster
    there |= {roster.witness} if roster.witness and not witness_fault else frozenset()
    return {
        "changes": roster.changes,
        "tolerance": tolerance(roster, there) if disks.has_view else "the run has not begun",
        "rows": [
            {
                "region": name,
                "kind": line.kind.value,
                "since": line.since,
                "address": line.address,
                "has_folder": bool(disks.disk_of(name)),
                "is_there": name in there,
                "fault": witness_fault if name == roster.witness else "",
            }
            for name, line in roster.memberships.items()
        ],
    }


def member_order(
    document: Mapping[str, Any], roster: Roster, addresses: Mapping[str, str | None] = MappingProxyType({})
) -> EntryOrdered:
    """The order in a request.

    Args:
        roster: the members now. addresses: where each of them is dialed.

    Raises ConfigError: it is none, or was signed for other members, or what it adds is there or has another's address.
    """
    region, kind, signature = (document.get(key) for key in ("region", "kind", "signature"))
    if not isinstance(region, str) or REGION_PATTERN.fullmatch(region) is None or kind not in KINDS:
        raise ConfigError(f"the body must name a region, and its kind: {', '.join(sorted(KINDS))}")
    try:
        octets = bytes.fromhex(signature if isinstance(signature, str) else "?")
    except ValueError:
        raise ConfigError("the signature must be a text of hexadecimal digits") from None
    address = document.get("address") or ""
    if kind == MemberKind.WITNESS:
        _check_bucket(address)
    elif address:
        _check_new(region, address, roster, addresses)
    if document.get("changes", roster.changes + 1) != roster.changes + 1:
        raise ConfigError("the members were changed meanwhile: look at `diloco-node members list`, and order it again")
    body = MembershipBody(region, MemberKind(kind).value, address, octets)
    return EntryOrdered(body, is_cut_off=kind == MemberKind.FORMER, is_forced=document.get("force") is True)


def _check_bucket(url: Any) -> None:
    """Refuse a witness that is no bucket. Raises ConfigError."""
    from diloco_node.storage.object_store import bucket_scheme

    if not isinstance(url, str) or len(url) > ADDRESS_BYTES:
        raise ConfigError(f"a witness has the URL of a bucket, of at most {ADDRESS_BYTES} characters")
    bucket_scheme(url)


def _check_new(region: str, address: Any, roster: Roster, addresses: Mapping[str, str | None]) -> None:
    """Refuse a member to be added that is there already, or has another's address. Raises ConfigError."""
    from diloco_node.config.field_types import host_port_of  # brings pydantic, which the daemon else does without

    if (kind := roster.kind_of(region)) is not MemberKind.FORMER:
        place = addresses.get(region) or "an address that is not known here"
        raise ConfigError(f"{region} is a {kind} already, at {place}: to move it, remove it first and add it again")
    try:
        host_port_of(address)
    except ValueError as error:
        raise ConfigError(f"the address {address!r}: {error}") from None
    if owner := next((name for name in roster.names if addresses.get(name) == address), ""):
        raise ConfigError(f"{address} is the address of {owner}: give that of {region}")

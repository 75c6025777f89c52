"""The members of the run for people, and an operator's change of them as it comes from the admin port."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from diloco_node.core.ledger.disks import DiskView
from diloco_node.core.ledger.roster import KINDS
from diloco_node.core.member_kind import MemberKind, MembershipBody
from diloco_node.core.membership.member_change import tolerance
from diloco_node.core.operator_orders import EntryOrdered
from diloco_node.core.shapes import REGION_PATTERN
from diloco_node.errors import ConfigError


def members_document(disks: DiskView, there: frozenset[str]) -> dict[str, Any]:
    """The members by the log, and what the run can bear.

    Args:
        there: the regions that are there, this one too.
    """
    roster = disks.roster
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
            }
            for name, line in roster.memberships.items()
        ],
    }


def member_order(document: Mapping[str, Any]) -> EntryOrdered:
    """The order in a request. Raises ConfigError: it is none."""
    region, kind, signature = (document.get(key) for key in ("region", "kind", "signature"))
    if not isinstance(region, str) or REGION_PATTERN.fullmatch(region) is None or kind not in KINDS:
        raise ConfigError(f"the body must name a region, and its kind: {', '.join(sorted(KINDS))}")
    try:
        octets = bytes.fromhex(signature if isinstance(signature, str) else "?")
    except ValueError:
        raise ConfigError("the signature must be a text of hexadecimal digits") from None
    body = MembershipBody(region, MemberKind(kind).value, signature=octets)
    return EntryOrdered(body, is_cut_off=kind == MemberKind.FORMER, is_forced=document.get("force") is True)

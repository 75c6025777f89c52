"""Orders of an operator that become entries of the ledger."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.types import DiskNamedBody, RevokedBody


@dataclass(frozen=True, slots=True)
class EntryOrdered:
    """An operator of this region, which leads, wants this in the ledger (`DiskReplacement`).

    is_cut_off: the region's links are closed by that.
    is_forced: the operator takes the risk that the next failure stops merging.
    """

    body: DiskNamedBody | RevokedBody | MembershipBody | SettingsBody
    is_cut_off: bool = False
    is_forced: bool = False

"""Orders of an operator that become entries of the ledger."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_node.core.types import DiskNamedBody, RevokedBody


@dataclass(frozen=True, slots=True)
class EntryOrdered:
    """An operator of this region, which leads, wants this in the ledger (`DiskReplacement`).

    Attributes:
        body: a region is EXPELLED, or readmitted (no folder), or its certificate revoked.
        is_cut_off: the region's links are closed by that.
    """

    body: DiskNamedBody | RevokedBody
    is_cut_off: bool

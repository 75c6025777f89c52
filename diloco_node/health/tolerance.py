"""How many more regions may fail before nothing is committed any more."""

from __future__ import annotations

from diloco_node.health.reading import Document, rows


def region_count(document: Document) -> int:
    """Regions of the run."""
    return 1 + len(rows(document, "peers"))


def alive_count(document: Document) -> int:
    """Regions that this one hears, itself included."""
    return 1 + sum(peer.get("is_alive") is True for peer in rows(document, "peers"))


def majority(regions: int) -> int:
    """The fewest that can commit."""
    return regions // 2 + 1


def failure_tolerance(document: Document) -> int:
    """Never negative: 0 means that the next failure stops merging, or that it has stopped."""
    return max(0, alive_count(document) - majority(region_count(document)))


def has_majority(document: Document) -> bool:
    """Whether this region and those that it hears can commit."""
    return alive_count(document) >= majority(region_count(document))

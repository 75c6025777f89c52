"""How many more regions may fail before nothing is committed any more, and how many learners before none trains."""

from __future__ import annotations

from diloco_node.health.reading import Document, number, rows, section, text


def region_count(document: Document) -> int:
    """Regions of the run."""
    return 1 + len(rows(document, "peers"))


def voter_count(document: Document) -> int:
    """Regions that count for a majority, heard or not, and the witness; without a voter that was away too long."""
    members = rows(section(document, "members"), "rows")
    voters = [row for row in members if text(row, "kind") in ("voter", "witness") and row.get("counts") is not False]
    return len(voters) or region_count(document)


def alive_count(document: Document) -> int:
    """Regions that this one hears, itself included."""
    return len(_alive(document))


def voting_count(document: Document) -> int:
    """Heard regions that can vote, and the witness if it answers: a region that lost its folder can't until the ledger
    names the new one."""
    voters = document.get("voters")
    members = rows(section(document, "members"), "rows")
    witnesses = [text(row, "region") for row in members if row.get("kind") == "witness" and row.get("is_there") is True]
    alive = _alive(document) + witnesses
    return sum(name in voters for name in alive) if isinstance(voters, list) else len(alive)


def _alive(document: Document) -> list[str]:
    peers = [text(peer, "name") for peer in rows(document, "peers") if peer.get("is_alive") is True]
    return [text(document, "region"), *peers]


def majority(regions: int) -> int:
    """The fewest regions that can commit."""
    return regions // 2 + 1


def is_founded(document: Document) -> bool:
    """Whether the run has begun, as far as is known: that takes all regions, and no majority does."""
    versions = document.get("versions")
    return not isinstance(versions, list) or not versions or any(version != -1 for version in versions)


def failure_tolerance(document: Document) -> int:
    """Never negative: 0 means that the next failure stops merging, or that it has stopped, or not begun."""
    spare = voting_count(document) - majority(voter_count(document))
    return max(0, spare) if is_founded(document) else 0


def has_majority(document: Document) -> bool:
    """Whether this region and those that it hears can commit."""
    return voting_count(document) >= majority(voter_count(document))


def training_tolerance(document: Document) -> int:
    """Learners that may stop before this region knows of none that trains. Never negative."""
    own = section(document, "learner")
    peers = [peer for peer in rows(document, "peers") if peer.get("is_alive") is True]
    count = (bool(own) and own.get("finished") is not True) + sum(number(peer, "step") is not None for peer in peers)
    return max(0, count - 1)

"""Projections of payloads and contributions, as the core orders them; arithmetic and reason are in
`core.merge.freivalds`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from diloco_node.core.types import Ballot, Contribution, Stripe


@dataclass(frozen=True, slots=True)
class Window:
    """Some blocks of a payload, in one piece and of one reducer. `seed`: of the signs."""

    reducer: str
    piece: int
    block_start: int
    block_stop: int
    seed: bytes


@dataclass(frozen=True, slots=True)
class Projection:
    """A region's own results; each part is empty while it is not worked out, or if the bytes are gone.

    Attributes:
        sums: per window, the projection of the decoded payload.
        errors: per window, square of what encoding may change in it at most, as a length.
        contribution: per window, the projection of the own contribution.
    """

    sums: tuple[float, ...] = ()
    errors: tuple[float, ...] = ()
    contribution: tuple[float, ...] = ()


NO_PROJECTION: Final = Projection()


@dataclass(frozen=True, slots=True)
class Project:
    """The effect: project a ballot's merged payload, the own contribution to it, or both; answer Projected.

    Attributes:
        stripes: of the ballot, whose merged ones are in memory; none: not the payload.
        contribution: the own one; None: not that.
    """

    ballot: Ballot
    fragment: int
    version: int
    windows: tuple[Window, ...]
    stripes: tuple[Stripe, ...] = ()
    contribution: Contribution | None = None


@dataclass(frozen=True, slots=True)
class Projected:
    """The event: the answer to Project."""

    ballot: Ballot
    projection: Projection


@dataclass(frozen=True, slots=True)
class ProjectContributions:
    """The effect: project contributions that were all reduced here; answer ContributionsProjected.

    windows: each lies in one of the stripes, whoever reduced it.
    """

    fragment: int
    version: int
    contributions: tuple[Contribution, ...]
    stripes: tuple[Stripe, ...]
    windows: tuple[Window, ...]


@dataclass(frozen=True, slots=True)
class ContributionsProjected:
    """The event. `rows`: per contribution, per window; none if their bytes are not here any more."""

    fragment: int
    version: int
    windows: tuple[Window, ...]
    rows: tuple[tuple[float, ...], ...]

"""The core of a simulated region, and the hooks by which a test plants a fault into it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from diloco_node.core.ledger.roster import Roster
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.region import RegionCore
from diloco_node.core.types import Recovered
from diloco_node.lab.sim.host import RUN_ID, Host
from diloco_node.lab.sim.setup import Setup


def make_core(region: str, setup: Setup, recovery: Recovered, seed: int, now_ns: int) -> Any:
    """Return the real core, unharmed."""
    return RegionCore(
        region=region,
        regions=setup.founders,
        run_id=RUN_ID,
        settings_digest="simulated",
        manifest=setup.manifest,
        settings=setup.settings,
        recovery=recovery,
        seed=seed,
        secret=hashlib.sha256(f"{seed}/{region}".encode()).digest(),
        now_ns=now_ns,
        authority=authority,
    )


def signature_of(statement: bytes) -> bytes:
    """Sign as the authority of a simulated run."""
    return hashlib.sha256(b"the authority's secret" + statement).digest()


def signed(roster: Roster, body: MembershipBody, run_id: str = RUN_ID) -> MembershipBody:
    """The change of this roster with the authority's signature."""
    return replace(body, signature=signature_of(roster.changed(body).statement(run_id)))


def authority(statement: bytes, signature: bytes) -> str:
    """See `roster.Authority`."""
    return "" if signature == signature_of(statement) else "no authority of the run has signed it"


def _leave(_: object) -> None:
    """Change nothing. A function of its own, as those below: a fault goes to other processes by pickle."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A rule to break in every region of a run, to show that some checker notices.

    Attributes:
        name: for reports. breaks: the rule, in words.
        spoil: changes a core right after it was made. plant: changes a host before the run.
    """

    name: str
    breaks: str
    spoil: Callable[[Any], None] = _leave
    plant: Callable[[Host], None] = _leave

    def make_core(self, region: str, setup: Setup, recovery: Recovered, seed: int, now_ns: int) -> Any:
        """Return the real core with the fault in it."""
        core = make_core(region, setup, recovery, seed, now_ns)
        self.spoil(core)
        return core

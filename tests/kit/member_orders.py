"""Changes of the members as an operator orders them: signed by the authority of a simulated run."""

from dataclasses import replace

from diloco_node.core.ledger.roster import Roster
from diloco_node.core.member_kind import MembershipBody
from diloco_node.lab.sim.planting import signature_of


def signed(roster: Roster, body: MembershipBody, run_id: str = "simulated") -> MembershipBody:
    """The change of this roster with the authority's signature."""
    return replace(body, signature=signature_of(roster.changed(body).statement(run_id)))

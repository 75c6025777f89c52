"""Entries of a made-up token account, without model and digests."""

from diloco_node.core.ledger.entries import ZERO_HASH, seal
from diloco_node.core.types import Ballot, Contribution, Entry, EntryBody, Member, RoundBody

TOKENS_PER_STEP = 499


def offer(
    learner: str, fragment: int, step_from: int, step_to: int, *, incarnation: int = 1, base: int = 0, snapshot: int = 1
) -> Contribution:
    tokens = TOKENS_PER_STEP * (step_to - step_from)
    return Contribution(learner, incarnation, fragment, base, snapshot, step_from, step_to, tokens, ())


def account_round(version: int, *contributions: Contribution) -> RoundBody:
    members = tuple(Member(contribution, 1.0) for contribution in contributions)
    return RoundBody(contributions[0].fragment, version, Ballot(1, 1), members, 1.0, (), (), bytes(32))


def seal_all(*bodies: EntryBody) -> list[Entry]:
    entries: list[Entry] = []
    for body in bodies:
        entries.append(seal(len(entries) + 1, 1, entries[-1].hash if entries else ZERO_HASH, body))
    return entries

"""Entries that follow one another, and what an entry check says of the next one."""

from dataclasses import replace

from diloco_node.core.rounds.entry_check import EntryCheck
from diloco_node.core.types import (
    Ballot,
    DiscardedBody,
    EntryBody,
    RoundBody,
    Stripe,
)
from tests.kit.rounds_kit import MANIFEST, REGIONS, SETTINGS, Ledger, committed_round, contribution

RUN = ("run", "settings", MANIFEST.digest, REGIONS)


BLOCKS = [sum(-(-size // 256) for size in fragment.piece_sizes) for fragment in MANIFEST.fragments]


def whole(body: RoundBody) -> RoundBody:
    return replace(body, stripes=(Stripe("a", 0, 1), Stripe("b", 1, BLOCKS[body.fragment])))


def a_round(*learners: str, fragment: int = 0, version: int = 1, **fields: object) -> RoundBody:
    members = [contribution(name, fragment, **fields) for name in learners or ("a", "b")]  # type: ignore[arg-type]
    return whole(committed_round(fragment, version, members, ballot=Ballot(1, version)))


SUM_EVERY = 4


def new_check() -> EntryCheck:
    return EntryCheck(RUN, MANIFEST, replace(SETTINGS, summary_entries=SUM_EVERY))


def check_after(*bodies: EntryBody) -> tuple[EntryCheck, Ledger]:
    check, ledger = new_check(), Ledger()
    for body in bodies:
        entry = ledger.add(body)
        assert check.fault(entry) == ""
        check.take(entry)
    return check, ledger


def fault_of(body: EntryBody, *before: EntryBody) -> str:
    check, ledger = check_after(*before)
    return check.fault(ledger.add(body))


FIRST = a_round()


DISCARD = DiscardedBody("b", 1, 0, 10, 15, 64, "died")

"""Numbers that a leader writes into a round: an honest one's are not doubted, and others are."""

import random
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from diloco_node.core.ledger.entries import ZERO_HASH
from diloco_node.core.ledger.summary import encode_summary
from diloco_node.core.merge.freivalds import WINDOWS, are_rows_due, draw_windows
from diloco_node.core.merge.numbers import MergeNumbers, merge_numbers, outer_rates
from diloco_node.core.merge.outliers import ROUNDS_KEPT, RecentRounds
from diloco_node.core.merge.stripes import piece_blocks
from diloco_node.core.merge.weights import to_float32
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.types import (
    Contribution,
    EntryBody,
    FinishedBody,
    LedgerBase,
    Member,
    RoundBody,
)
from tests.kit.entry_check_kit import DISCARD, FIRST, a_round, check_after, fault_of, new_check
from tests.kit.rounds_kit import GENESIS, MANIFEST, SETTINGS, Ledger, contribution, history_of

RDA = 1
"""The fragment whose factors depend on the sum."""


THREE = tuple(
    replace(contribution(name, RDA, steps=(0, steps), norm=norm), tokens=tokens)
    for name, steps, tokens, norm in (("a", 10, 640, 4.0), ("b", 12, 700, 5.0), ("c", 7, 450, 3.0))
)


def numbers_of(
    members: tuple[Contribution, ...], *before: EntryBody, version: int = 1, is_last: bool = False
) -> MergeNumbers:
    """What a leader works out after these entries."""
    history = history_of(*before)
    return merge_numbers(
        MANIFEST.fragments[RDA],
        SETTINGS,
        members,
        carried_since=[history.account.carried_since(member) for member in members],
        recent=history.recent[RDA],
        version=version,
        is_last=is_last,
    )


def honest(
    members: tuple[Contribution, ...] = THREE,
    *before: EntryBody,
    version: int = 1,
    is_last: bool = False,
    part: float = 0.5,
) -> RoundBody:
    """The entry that an honest leader makes of a sum which is so long, as a part of the longest that it can be."""
    numbers = numbers_of(members, *before, version=version, is_last=is_last)
    norms = tuple((part * radius) ** 2 for radius in numbers.radii())
    entry_members = tuple(map(Member, members, numbers.weights))
    body = replace(
        a_round("a", fragment=RDA, version=version), members=entry_members, share=numbers.share, is_last=is_last
    )
    lr, mu = outer_rates(SETTINGS, is_last=is_last)
    return replace(body, squared_norms=norms, factors=numbers.factors(norms), outer_lr=lr, outer_momentum=mu)


def doubt_of(body: EntryBody, *before: EntryBody) -> str:
    check, ledger = check_after(*before)
    entry = ledger.add(body)
    assert check.fault(entry) == "", "nothing but its numbers is wrong"
    return check.doubt(entry)


AFTER = honest((replace(THREE[1], step_from=12, step_to=20, base_version=1, snapshot=2),), GENESIS, honest(), version=2)
"""Of b alone."""


BACK = (
    replace(THREE[0], step_from=10, step_to=30, base_version=2, snapshot=2),
    replace(THREE[1], step_from=20, step_to=30, base_version=2, snapshot=3),
)
"""a comes back after a version without it: it weighs more, and the share is below one."""


def test_a_round_has_the_rates_of_the_settings_at_its_entry() -> None:
    settings = replace(SettingsBody.of(SETTINGS), outer_lr=0.25)
    words = "its outer step has the rates 0.5 and 0.6, the settings say (0.25, 0.6)"
    assert doubt_of(honest(), GENESIS, settings) == words
    assert doubt_of(replace(honest(), outer_lr=0.25), GENESIS, settings) == ""
    assert doubt_of(honest(), GENESIS, settings, SettingsBody.of(SETTINGS)) == ""
    assert doubt_of(honest(), replace(GENESIS, settings=(settings,))) == words


def test_settings_that_change_nothing_or_come_after_the_end_are_refused() -> None:
    settings = replace(SettingsBody.of(SETTINGS), sync_every=99)
    assert fault_of(settings, GENESIS) == ""
    assert fault_of(settings, GENESIS, settings) == "settings that change nothing"
    assert fault_of(settings) == "a SettingsBody before genesis"
    assert fault_of(settings, GENESIS, FinishedBody((0, 0), "x")) == "settings after the end"


@pytest.mark.parametrize("is_last", [False, True])
def test_an_honest_leaders_numbers_are_not_doubted(is_last: bool) -> None:
    assert doubt_of(honest(is_last=is_last), GENESIS) == ""
    third = honest(BACK, GENESIS, honest(), AFTER, version=3, is_last=is_last)
    assert third.share == 1.0 if is_last else third.share < 1.0
    assert doubt_of(third, GENESIS, honest(), AFTER) == ""
    assert doubt_of(DISCARD, GENESIS, FIRST) == ""


def scaled(body: RoundBody, factor: float) -> RoundBody:
    return replace(body, members=tuple(replace(member, weight=factor * member.weight) for member in body.members))


LIES = {
    "huge factors": lambda body: replace(body, factors=(to_float32(1e30),) * len(body.factors)),
    "no step": lambda body: replace(body, factors=(0.0,) * len(body.factors)),
    "a denormal factor": lambda body: replace(body, factors=(2.0**-140, *body.factors[1:])),
    "factors a little off": lambda body: replace(body, factors=tuple(to_float32(1.0001 * f) for f in body.factors)),
    "one factor of two": lambda body: replace(body, factors=(2.0 * body.factors[0], *body.factors[1:])),
    "a tiny share": lambda body: replace(body, share=2.0**-126),
    "half the share": lambda body: replace(body, share=body.share / 2),
    "weights of others": lambda body: replace(
        body,
        members=tuple(
            replace(member, weight=other.weight)
            for member, other in zip(body.members, (*body.members[1:], body.members[0]), strict=True)
        ),
    ),
    "equal weights": lambda body: replace(body, members=tuple(replace(member, weight=1.0) for member in body.members)),
    "one weight is nothing": lambda body: replace(
        body, members=(replace(body.members[0], weight=0.0), *body.members[1:])
    ),
    "a denormal weight": lambda body: replace(
        body, members=(replace(body.members[0], weight=2.0**-149), *body.members[1:])
    ),
    "weights of another scale": lambda body: scaled(body, 2.0),
    "a plain mean in the middle": lambda body: replace(body, is_last=True),
    "a sum of nothing": lambda body: replace(body, squared_norms=(0.0,) * len(body.squared_norms)),
    "a sum that is longer than its members": lambda body: with_norms(body, 1.3),
    "a sum a thousand times too long": lambda body: with_norms(body, 1e6),
    "tokens that count double": lambda body: with_member(body, tokens=2 * body.members[1].contribution.tokens),
    "norms of another": lambda body: with_member(body, squared_norms=body.members[0].contribution.squared_norms),
    "steps that count less": lambda body: with_member(body, step_to=body.members[1].contribution.step_to - 1),
}


def with_norms(body: RoundBody, factor: float) -> RoundBody:
    """The norms are beyond the bound, and the factors are what follows from them."""
    numbers = numbers_of(tuple(member.contribution for member in body.members), is_last=body.is_last)
    norms = tuple(factor * radius * radius for radius in numbers.radii())
    return replace(body, squared_norms=norms, factors=numbers.factors(norms))


def with_member(body: RoundBody, **changed: object) -> RoundBody:
    member = body.members[1]
    other = replace(member, contribution=replace(member.contribution, **changed))  # type: ignore[arg-type]
    return replace(body, members=(body.members[0], other, *body.members[2:]))


@pytest.mark.parametrize("lie", LIES)
def test_a_leader_that_writes_other_numbers_is_doubted(lie: str) -> None:
    body = LIES[lie](honest())
    assert body != honest()
    assert doubt_of(body, GENESIS), lie


@pytest.mark.parametrize("lie", ["half the share", "a plain mean in the middle", "weights of others"])
def test_the_versions_that_a_member_missed_are_part_of_it(lie: str) -> None:
    before = (GENESIS, honest(), AFTER)
    body = honest(BACK, *before, version=3)
    assert doubt_of(LIES[lie](body), *before)
    assert doubt_of(replace(body, share=1.0), *before) == f"its share 0 is 1, {body.share:.9g} follows from its members"


def test_a_sum_as_long_as_all_together_is_welcome_with_what_rounding_adds() -> None:
    assert doubt_of(honest(part=1.0), GENESIS) == ""
    assert doubt_of(honest(part=1.0 + 15 / 254), GENESIS) == ""
    assert "members can't exceed" in doubt_of(honest(part=1.08), GENESIS)


def test_what_the_rounds_before_make_of_a_contribution_is_worked_out_behind_a_base_too() -> None:
    """How long gradients usually are decides how much of one counts: a summary must say it."""
    rounds: list[EntryBody] = [GENESIS]
    for version in range(1, ROUNDS_KEPT + 1):
        steps = {"step_from": 10 * version - 10, "step_to": 10 * version}
        member = replace(THREE[0], base_version=version - 1, snapshot=version, **steps)
        rounds.append(honest((member,), *rounds, version=version))
    steps = {"step_from": 10 * ROUNDS_KEPT, "step_to": 10 * ROUNDS_KEPT + 10}
    long = replace(THREE[0], base_version=ROUNDS_KEPT, snapshot=99, squared_norms=(4e6, 4e6), **steps)
    body = honest((long,), *rounds, version=ROUNDS_KEPT + 1, part=0.9)
    assert doubt_of(body, *rounds) == ""
    history = history_of(*rounds)
    ledger = Ledger()
    for earlier in rounds:
        ledger.add(earlier)
    behind = new_check()
    base = LedgerBase(len(rounds), 1, ledger.entries[-1].hash, encode_summary(history.sum_up()))
    assert behind.base_fault(base) == ""
    behind.begin(base)
    entry = ledger.add(body)
    assert (behind.fault(entry), behind.doubt(entry)) == ("", "")
    unclipped = numbers_of((long,), version=body.version).factors(body.squared_norms)
    assert unclipped != body.factors
    assert "follows from its members" in behind.doubt(ledger.add(replace(body, factors=unclipped)))


@pytest.mark.parametrize(
    "recent",
    [
        b"",
        struct.pack("<II", 1, 1),
        struct.pack("<II3f", 1, 1, 1.0, float("nan"), 1.0),
        struct.pack("<II3f", 1, 1, 1.0, -1.0, 1.0),
        struct.pack("<II5f", 1, 2, 1.0, 1.0, 1.0, 1.0, 1.0),
        struct.pack("<II", 2**31, 2**31),
    ],
)
def test_a_base_whose_norms_are_none_is_refused(recent: bytes) -> None:
    summary = replace(history_of(GENESIS).sum_up(), recent=(recent, RecentRounds().packed()))
    base = LedgerBase(1, 1, ZERO_HASH, encode_summary(summary))
    assert "norms of" in new_check().base_fault(base)


def audited(body: RoundBody, rows: Sequence[Sequence[float]], *, are_due: bool = True) -> RoundBody:
    """The entry of a round that is audited, with a row per member."""
    blocks = piece_blocks(MANIFEST.fragments[body.fragment].piece_sizes)
    draws = ((bytes([number]) * 32,) for number in range(256))
    nonces = next(draw for draw in draws if draw_windows(draw, body.stripes, blocks) and are_rows_due(draw) is are_due)
    return replace(body, nonces=nonces, projections=tuple(map(tuple, rows)))


def test_an_entry_has_the_rows_of_all_that_are_in_its_sum_where_they_are_due() -> None:
    rows: list[Sequence[float]] = [(0.5,) * WINDOWS] * 3
    lacking: list[Sequence[float]] = [(), *rows[:1], ()]
    assert doubt_of(audited(honest(), rows), GENESIS) == ""
    assert doubt_of(audited(honest(), lacking, are_due=False), GENESIS) == ""
    assert doubt_of(audited(honest(), lacking), GENESIS).startswith("it lacks the projections of a, c, which are due")
    assert "it lacks the projections of a, b, c" in doubt_of(audited(honest(), ()), GENESIS)
    far = (replace(THREE[0], squared_norms=tuple(1e6 * square for square in THREE[0].squared_norms)), *THREE[1:])
    assert honest(far).members[0].weight == 0.0
    assert doubt_of(audited(honest(far), [(), *rows[:2]]), GENESIS) == "", "nothing of a is in the sum"


def test_who_points_against_the_others_in_many_audits_weighs_nothing_behind_a_base_too() -> None:
    rounds: list[Any] = [GENESIS]
    chance = random.Random(1)
    for version in range(1, 22):
        steps: dict[str, Any] = {"step_from": 10 * version - 10, "step_to": 10 * version, "base_version": version - 1}
        members = tuple(replace(member, snapshot=version, **steps) for member in THREE)
        body = honest(members, *rounds, version=version)
        if version < 21:
            common = [chance.gauss(0.0, 1.0) for _ in range(WINDOWS)]
            rows = [[sign * (value + chance.gauss(0.0, 1.0)) for value in common] for sign in (1.0, 1.0, -1.0)]
            rounds.append(audited(body, rows))
    assert [member.weight > 0.0 for member in body.members] == [True, True, False]
    assert [member.weight > 0.0 for member in rounds[-20].members] == [True, True, True], "audits tell it, not one"
    assert doubt_of(body, *rounds) == ""
    everybody = tuple(replace(member, weight=body.members[0].weight) for member in body.members)
    assert "its weight" in doubt_of(replace(body, members=everybody), *rounds)
    assert doubt_of(honest(members, version=21), *rounds), "as if nothing was known"
    ledger = Ledger()
    for earlier in rounds:
        ledger.add(earlier)
    behind = new_check()
    behind.begin(LedgerBase(len(rounds), 1, ledger.entries[-1].hash, encode_summary(history_of(*rounds).sum_up())))
    entry = ledger.add(body)
    assert (behind.fault(entry), behind.doubt(entry)) == ("", "")

"""One region lies in one field at a time, over the real listener: the others go on, end nothing and accept nothing."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from mutant import Mutant
from mutations import Mutation, mutations, rows_of

from diloco_node.core.messages import FinishRequested
from diloco_node.core.types import RoundBody
from tests.kit.cluster_kit import Cluster, Statuses, all_train, brief

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(2400)]

MORE_ROUNDS = {"sync_every = 16": "sync_every = 8"}
STEPS = 64
"""Over so many inner steps rounds are counted: some thirty of them."""

WINDOWS = 5
"""So many times they are counted afterwards: what is wrong has so long to be found out and left out."""

REFUSED_PER_ROW = 1
"""Of those that `wire` refuses by their shape: each costs a link, and tests/wire has all of them."""


async def test_no_wrong_field_of_a_region_stops_ends_or_changes_the_others(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "run", 4, changes=MORE_ROUNDS)
    try:
        await cluster.start()
        await cluster.until_trains()
        await cluster.until_commits(8)
        leader = await cluster.until_leader()
        liar = cluster.others(leader)[0]
        others = cluster.others(liar)
        status = (await cluster.statuses([liar]))[liar]
        await cluster.kill(liar)
        before = await cluster.until_commits(4, others, why=f"without {liar}")
        mutant = Mutant(cluster.folder, liar)
        try:
            await mutant.start(status)
            await heard(cluster, mutant, liar, others)
            usual = await rounds_per_step(cluster, others)
            sent = await attack(cluster, mutant, others)
            rates: list[float] = []
            while not any(rate >= 0.5 * usual for rate in rates) and len(rates) < WINDOWS:
                rates.append(await rounds_per_step(cluster, others))
        finally:
            await mutant.stop()
        after = await cluster.until_commits(4, others, why="after the last wrong message")
        check_unharmed(before, after)
        print(f"{len(sent)} wrong messages of {len(rows_of(sent))} fields; rounds per step {usual}, {rates}")
        assert rates[-1] >= 0.5 * usual, f"rounds per step: {usual}, and afterwards {rates}"
        assert len(rows_of(sent)) > 100
        await cluster.start(liar)
        await cluster.until("the region itself is back", all_train)
        await cluster.until_merged(liar, why="after somebody spoke in its name")
        await cluster.end()
        cluster.check_equal(differences_max=None)  # the liar told other digests, and each was an alarm
        account = cluster.account()
        assert account.faults == ()
        check_accepted(cluster, liar)
    finally:
        await cluster.clear()


async def heard(cluster: Cluster, mutant: Mutant, liar: str, others: list[str]) -> None:
    """What follows reaches the cores: they take the client for the region, and know what its learner says."""
    step = mutant.learner().step
    await cluster.until(
        "everybody takes the client for the region",
        lambda now: all(
            peer["is_alive"] and peer["step"] == step
            for one in now.values()
            for peer in one["peers"]
            if peer["name"] == liar
        ),
        others,
    )


async def attack(cluster: Cluster, mutant: Mutant, others: list[str]) -> list[Mutation]:
    """Send all of it, to all at once. What has its shape goes to everybody; what has not, to one after the other."""
    sent: list[Mutation] = []
    refused: Counter[tuple[str, str]] = Counter()
    kinds = len(mutant.bases()) + len(mutant.headers())
    for kind in range(kinds):
        bases = mutant.bases()  # anew each time: terms, ballots and versions go on
        is_header = kind >= len(bases)
        base = mutant.headers()[kind - len(bases)] if is_header else bases[kind]
        wrong: dict[str, list[Mutation]] = {peer: [] for peer in others}
        for mutation in mutations(base, is_header=is_header):
            if mutation.has_shape and isinstance(base, FinishRequested):
                continue  # the word of the operator there, whatever the reason: it does end the run
            if mutation.has_shape:
                targets = others
            elif refused[mutation.row] < REFUSED_PER_ROW:
                refused[mutation.row] += 1
                targets = [others[len(sent) % len(others)]]
            else:
                continue
            for peer in targets:
                wrong[peer].append(mutation)
            sent.append(mutation)
        async with asyncio.TaskGroup() as sending:
            for peer, batch in wrong.items():
                sending.create_task(send_all(mutant, peer, batch))
        statuses = await cluster.statuses(others)
        ended = {name: one["state"] for name, one in statuses.items() if one["state"] in ("finishing", "finished")}
        assert not ended, f"after {type(base).__name__}: {ended}\n{brief(statuses)}"
    return sent


async def send_all(mutant: Mutant, peer: str, batch: list[Mutation]) -> None:
    """One after the other: each that is refused costs a link."""
    for mutation in batch:
        await mutant.send(peer, mutation)


async def rounds_per_step(cluster: Cluster, names: list[str]) -> float:
    """Rounds that these regions commit for each inner step of theirs: a busy machine slows both down."""
    first = await cluster.until_commits(1, names, why="at all")

    def made(now: Statuses) -> float:
        return sum(now[name]["learner"]["step"] - first[name]["learner"]["step"] for name in names) / len(names)

    last = await cluster.until(f"{STEPS} steps", lambda now: made(now) >= STEPS, names)
    return (committed(last) - committed(first)) / made(last)


def committed(statuses: Statuses) -> int:
    return max(one["rounds_committed"] for one in statuses.values())


def check_unharmed(before: Statuses, after: Statuses) -> None:
    """No process was started anew, and nothing ended."""
    for name, now in after.items():
        assert now["pids"] == before[name]["pids"], f"a process of {name} died"
        assert now["state"] == "training", now["reason"]
        assert now["learner"]["incarnation"] == before[name]["learner"]["incarnation"]
        assert now["term"] < 2**32, "terms ran away"


def check_accepted(cluster: Cluster, liar: str) -> None:
    """The ledger has of the liar's learner only what a learner did: no more steps than one makes in the time."""
    bodies: list[Any] = [entry.body for entry in cluster.ledger()[1]]
    made = [
        member.contribution
        for body in bodies
        if isinstance(body, RoundBody)
        for member in body.members
        if member.contribution.learner == liar
    ]
    assert all(one.step_to < 2**31 and one.tokens < 2**31 for one in made)

"""The witnesses of the simulator find what they are there for: the oracle's bits and the audit's intervals."""

import dataclasses
import random

import numpy as np
import pytest

from diloco_node.codec.digest import fragment_digest, payload_digest, stripe_digest
from diloco_node.core import events as ev
from diloco_node.core.membership.absence import EVICT_AFTER_NS
from diloco_node.core.merge import weights
from diloco_node.core.merge.numbers import MergeNumbers
from diloco_node.core.types import Ballot, Codec, Contribution, DiscardedBody, GenesisBody, Member, RoundBody, Stripe
from diloco_node.lab.sim import fake_tensors as tensors
from diloco_node.lab.sim.audit import Audit
from diloco_node.lab.sim.member_check import MemberCheck
from diloco_node.lab.sim.oracle import Oracle
from diloco_node.lab.sim.setup import Setup, draw_setup

SEED = 5
LEARNERS = ("asia-ne", "eu-west", "sa-east")


def make_setup() -> Setup:
    setup = draw_setup(random.Random(SEED), 3)
    return dataclasses.replace(
        setup, settings=dataclasses.replace(setup.settings, codec_up=Codec.BF16, codec_down=Codec.FP32)
    )


class Bench:
    """A committed round of three learners on fragment 0, made by hand."""

    def __init__(self) -> None:
        self.setup = make_setup()
        self.found: list[str] = []
        self.oracle = Oracle(self.setup, self.found.append, lambda _: None)
        self.layout = self.setup.layouts[0]
        generator = np.random.default_rng(SEED)
        self.theta = [generator.standard_normal(one.values).astype(np.float32) for one in self.setup.layouts]
        digests = tuple(fragment_digest(values, np.zeros_like(values)) for values in self.theta)
        self.oracle.genesis(GenesisBody("run", "m", "s", LEARNERS, digests), [self.theta])
        self.generator = generator
        self.offered: dict[Contribution, bytes] = {}

    def offer(self, learner: str, base_version: int, steps: tuple[int, int]) -> Contribution:
        # Of one length in all pieces, so that none is clipped.
        signs = self.generator.choice([-1.0, 1.0], self.layout.values)
        values = (signs * self.generator.uniform(0.7, 1.4, self.layout.values)).astype(np.float32)
        encoded = tensors.encode(values, Codec.BF16)
        norms = tensors.squared_norms(self.layout, tensors.decode(encoded, Codec.BF16), 0, self.layout.block_count)
        one = Contribution(learner, 1, 0, base_version, steps[1], *steps, 64 * (steps[1] - steps[0]), norms)
        self.offered[one] = encoded
        self.oracle.contribution_made(one, encoded)
        return one

    def merge(self, version: int, ballot: Ballot, *, order: tuple[int, ...] = (0, 1, 2)) -> RoundBody:
        made = [self.offer(name, version - 1, (6 * version - 6, 6 * version)) for name in LEARNERS]
        rules = self.setup.manifest.fragments[0].rules
        whole = ((1.0,) * len(rules),) * len(made)
        raw = weights.weights(made, [0] * len(made), whole, self.setup.settings)
        numbers = MergeNumbers(tuple(made), tuple(rules), raw, ((1.0,) * len(rules),) * len(made), 1.0)
        rows = numbers.coefficients()
        middle = self.layout.block_count // 2
        stripes = (Stripe("asia-ne", 0, middle), Stripe("sa-east", middle, self.layout.block_count))
        parts = []
        for stripe in stripes:
            low, high = tensors.byte_range(self.layout, stripe.block_start, stripe.block_stop, Codec.BF16)
            decoded = [tensors.decode(self.offered[made[at]][low:high], Codec.BF16) for at in order]
            spreads = [tensors.spread(self.layout, rows[at], stripe.block_start, stripe.block_stop) for at in order]
            parts.append(tensors.reduce_stripe(decoded, spreads, Codec.FP32))
        digest = payload_digest(stripe_digest(part.encoded) for part in parts)
        values = np.concatenate([part.decoded for part in parts])
        norms = tensors.squared_norms(self.layout, values, 0, self.layout.block_count)
        factors = numbers.factors(norms)
        members = tuple(Member(one, value) for one, value in zip(made, raw, strict=True))
        return RoundBody(0, version, ballot, members, 1.0, factors, stripes, digest, squared_norms=norms)


def test_an_honest_round_is_accepted_and_makes_the_next_version() -> None:
    bench = Bench()
    for version in (1, 2):
        bench.oracle.round_committed(bench.merge(version, Ballot(1, version)))
    assert bench.found == []
    assert bench.oracle.versions() == (2, *(0 for _ in bench.setup.layouts[1:]))
    digest = bench.oracle.digest_of(0, 2)
    assert digest is not None
    assert digest != bench.oracle.digest_of(0, 1)
    bench.oracle.digest_seen("eu-west", ev.DigestComputed(0, 2, digest))
    assert bench.found == []
    bench.oracle.digest_seen("eu-west", ev.DigestComputed(0, 2, bytes(16)))
    assert "other bytes at 0/2" in bench.found[0]


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 1, 0)])
def test_a_sum_in_another_order_is_found(order: tuple[int, ...]) -> None:
    bench = Bench()
    bench.oracle.round_committed(bench.merge(1, Ballot(1, 1), order=order))
    assert len(bench.found) == 1
    assert "not the sum of its members" in bench.found[0]


def test_other_factors_weights_or_members_are_found() -> None:
    for change in ("factors", "weight", "contribution", "order", "version"):
        bench = Bench()
        body = bench.merge(1, Ballot(1, 1))
        first = body.members[0]
        if change == "factors":
            body = dataclasses.replace(body, factors=(body.factors[0] * 1.01, *body.factors[1:]))
        elif change == "weight":
            body = dataclasses.replace(
                body, members=(dataclasses.replace(first, weight=first.weight * 1.5), *body.members[1:])
            )
        elif change == "contribution":
            never = dataclasses.replace(first, contribution=dataclasses.replace(first.contribution, step_to=7))
            body = dataclasses.replace(body, members=(never, *body.members[1:]))
        elif change == "order":
            body = dataclasses.replace(body, members=body.members[::-1])
        else:
            body = dataclasses.replace(body, version=2)
        bench.oracle.round_committed(body)
        assert bench.found, change


def test_one_name_stands_for_one_content() -> None:
    bench = Bench()
    one = bench.offer("eu-west", 0, (0, 6))
    bench.oracle.contribution_made(one, bench.offered[one])
    assert bench.found == []
    bench.oracle.contribution_made(one, bench.offered[one][::-1])
    assert "one name, two contents" in bench.found[0]


def round_of(version: int, base_version: int, steps: tuple[int, int], tokens: int = 10) -> RoundBody:
    one = Contribution("eu-west", 1, 0, base_version, 1, *steps, tokens, (1.0,))
    return RoundBody(0, version, Ballot(1, version), (Member(one, 1.0),), 1.0, (1.0,), (), b"")


COUNTERS = {"eu-west": {1: (30, 100)}}


@pytest.mark.parametrize(
    ("second", "is_right"),
    [
        (round_of(2, 1, (6, 12)), True),
        (round_of(3, 1, (6, 12)), True),
        (round_of(2, 0, (6, 12)), False),  # base older than its last inclusion
        (round_of(2, 1, (5, 12)), False),  # step 6 twice
        (round_of(2, 1, (7, 12)), False),  # step 7 lost
        (round_of(2, 1, (6, 6)), False),  # nothing
        (round_of(2, 1, (6, 31)), False),  # more than was trained
        (round_of(2, 1, (6, 12), tokens=91), False),
        (round_of(2, 2, (6, 12)), False),  # base is what it makes
        (DiscardedBody("eu-west", 1, 0, 6, 30, 90, "dead"), True),
        (DiscardedBody("eu-west", 1, 0, 7, 30, 20, "dead"), False),
        (DiscardedBody("eu-west", 1, 0, 6, 30, 91, "dead"), False),
    ],
)
def test_each_step_is_booked_once(second: RoundBody | DiscardedBody, is_right: bool) -> None:
    found: list[str] = []
    audit = Audit(make_setup(), found.append)
    audit.committed(round_of(1, 0, (0, 6)), COUNTERS)
    assert found == []
    audit.committed(second, COUNTERS)
    assert (found == []) == is_right, found


def test_an_eviction_may_be_refused_by_its_region_and_by_others_if_it_waited_as_long_as_an_absence_lasts() -> None:
    check = MemberCheck(LEARNERS, lambda _: None)
    assert not check.is_belated("eu-west is away for long: it has no vote from now on", now_ns=5)
    refusals = (
        "sa-east ignored entries from asia-ne, and follows it no more: entry 21: eu-west was heard here 0 s ago",
        "eu-west ignored entries from asia-ne, and follows it no more: entry 21: eu-west is here itself",
    )
    for text in refusals:
        # Its region knows no more than that it is here, whenever it comes back.
        assert check.is_belated(text, now_ns=EVICT_AFTER_NS + 4) == text.endswith("is here itself")
        assert check.is_belated(text, now_ns=EVICT_AFTER_NS + 5)
        assert not check.is_belated(text.replace("eu-west", "sa-east"), now_ns=EVICT_AFTER_NS + 5), "nobody evicted it"
    assert not check.is_belated("entry 21: eu-west: its factor is another one", now_ns=EVICT_AFTER_NS + 5)

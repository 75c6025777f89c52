"""The pure parts of benchmarks/gray.py and mutant.py: what samples add up to, and which wrong messages there are."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import gray
import msgpack
import mutant
import mutations
import pytest

from diloco_node.core import messages as m
from diloco_node.core import types as t
from diloco_node.lab.demo.region_processes import RegionProcess
from diloco_node.wire.envelope import decode_control, encode_control
from diloco_node.wire.message_tables import BULK_HEADERS, MESSAGES
from tests.kit.node_kit import MANIFEST
from tests.wire.test_field_bounds import dataclasses_in


def test_a_rate_counts_the_rounds_between_the_samples_of_a_window() -> None:
    samples = [gray.Sample(at / 2, at) for at in range(41)]
    assert gray.rate(samples, 5.0, 15.0) == pytest.approx(2.0)
    assert gray.rate(samples, 5.1, 5.4) == 0.0
    still = samples + [gray.Sample(20 + at / 2, 40) for at in range(20)]
    assert gray.rate(still, 20.0, 29.5) == 0.0
    assert gray.longest_gap_s(still, 5.0, 29.5) == pytest.approx(9.5)
    assert gray.longest_gap_s(still, 5.0, 15.0) == pytest.approx(0.5)


def test_what_is_kept_counts_per_step_of_the_others() -> None:
    slow = [gray.Sample(float(at), at, 8.0 * at) for at in range(11)]
    fast = [gray.Sample(float(at), 4 * at, 32.0 * at) for at in range(11)]
    assert gray.rounds_per_step(slow, 0.0, 10.0) == gray.rounds_per_step(fast, 0.0, 10.0) == pytest.approx(1 / 8)
    assert gray.rounds_per_step([gray.Sample(1.0, 3, 9.0)], 0.0, 10.0) == 0.0
    assert gray.rounds_per_step([], 0.0, 10.0) == 0.0


def test_a_region_is_back_when_every_fragment_has_steps_of_after_the_fault() -> None:
    region = RegionProcess("a", 0, Path())

    def see(incarnation: int, step: int, *positions: tuple[int, int]) -> None:
        found = [{"base_version": version, "included_step": included} for version, included in positions]
        region.status = {"learner": {"incarnation": incarnation, "step": step, "positions": found}}

    see(1, 50, (3, 40), (3, 40))
    back = gray.Back(region)
    see(1, 55, (4, 51), (3, 40))
    assert not back.is_so()
    see(1, 56, (4, 51), (4, 50))
    assert not back.is_so(), "step 50 is of the time of the fault"
    see(1, 57, (4, 51), (5, 51))
    assert back.is_so()


def test_a_region_that_gave_its_steps_up_is_back_when_later_ones_are_merged() -> None:
    region = RegionProcess("a", 0, Path(), status={"learner": None})
    back = gray.Back(region)
    assert not back.is_so()
    positions = [{"base_version": 3, "included_step": 40}]
    region.status = {"learner": {"incarnation": 1, "step": 50, "positions": positions}}
    assert not back.is_so(), "the first learner that is shown is the mark"
    positions[0] = {"base_version": 30, "included_step": 60}
    region.status["learner"]["step"] = 61
    assert not back.is_so(), "it took the others' state: nothing of it is merged"
    positions[0] = {"base_version": 31, "included_step": 66}
    assert back.is_so()
    region.status["learner"] = {"incarnation": 2, "step": 1, "positions": [{"base_version": 31, "included_step": 0}]}
    assert not back.is_so()


def test_the_table_names_what_could_not_be_measured() -> None:
    one = {"before_per_s": 2.5, "first_per_s": 0.0, "during_per_s": 2.4, "kept": 0.96, "longest_gap_s": 9.0}
    arms = {"mtu": one | {"back_s": None, "equal_digests": False}, "fsync": {"error": "no root"}}
    assert gray.lines(arms)[1].split() == ["mtu", "2.50", "0.00", "2.40", "96%", "9.0", "never", "NO"]
    assert gray.lines(arms)[2].split() == ["fsync", "no", "root"]


def test_a_message_is_encoded_as_wire_encodes_it() -> None:
    made = t.Contribution("a", 1, 0, 3, 2, 8, 16, 4096, (1.0, 2.0))
    decided = m.MergeDecided(t.Ballot(2, 7), 0, 4, (made,), ((0.5, 0.25),))
    for message in (m.Refused(0, 3, "gone"), decided):
        frame = b"\x02" + msgpack.packb(mutations.plain(message, mutations.TAGS))
        assert frame == encode_control(message)
        assert decode_control(frame) == message


def test_each_field_is_wrong_alone_and_in_several_ways() -> None:
    refused = m.Refused(1, 3, "gone")
    made = list(mutations.mutations(refused))
    right = mutations.plain(refused, mutations.TAGS)
    for one in made:
        wrong = msgpack.unpackb(one.data)
        assert sum(repr(a) != repr(b) for a, b in zip(wrong, right, strict=True)) == 1, one.text
    assert {one.row for one in made} == {("Refused", name) for name in ("fragment", "version", "reason")}
    assert any(one.has_shape for one in made)
    assert any(not one.has_shape for one in made)


def test_fields_of_what_is_inside_a_message_are_wrong_too() -> None:
    opened = m.BallotOpened(t.Ballot(1, 1), 0, 1, ("a",), (t.Stripe("a", 0, 8),), (m.ReusedStripe("a", 0),))
    rows = {one.row for one in mutations.mutations(opened)}
    assert {("Ballot", "term"), ("Stripe", "reducer"), ("BallotOpened", "stripes"), ("ReusedStripe", "stripe")} <= rows


def test_every_row_of_the_table_of_bounds_has_wrong_values(tmp_path: Path) -> None:
    made = mutant.Mutant(tmp_path, "ap-east")
    made.spec = SimpleNamespace(peers=dict.fromkeys(("eu-west", "us-east")), run_id="demo", settings_digest="d" * 64)
    made.manifest = MANIFEST
    position = {"included_step": 40, "included_tokens": 800}
    fragments = len(MANIFEST.fragments)
    learner = {"step": 50, "tokens": 1000, "incarnation": 1, "positions": [position] * fragments}
    made._status = {"applied_index": 5, "versions": [3] * fragments, "learner": learner}
    sent = [one for base in made.bases() for one in mutations.mutations(base)]
    sent += [one for base in made.headers() for one in mutations.mutations(base, is_header=True)]
    classes = dataclasses_in([*MESSAGES.values(), *BULK_HEADERS.values()])
    table = {(cls.__name__, field.name) for cls in classes for field in dataclasses.fields(cls)}
    assert table <= mutations.rows_of(sent)
    refused = {one.row for one in sent if not one.has_shape}
    assert table <= refused, "of each row there is a value that wire refuses"

"""wire/frozen_listing.py: frozen tensors that differ are named; quantisers, rounding and garbage raise no alarm."""

import json
import zlib
from dataclasses import replace
from math import sin

import pytest

from diloco_node.core.bounds import LISTING_BYTES_MAX
from diloco_node.wire.frozen_listing import FrozenTensor, frozen_difference, pack_frozen

REGIONS = ("eu", "us")
BASE = [FrozenTensor(f"layers.{n}.q.weight", "bfloat16", (8, 4), 3.0 + n, 10.0) for n in range(4)]
ROPE = FrozenTensor("rope.inv_freq", "float32", (32,), 1.5, 4.0)


def difference(here: list[FrozenTensor], there: list[FrozenTensor]) -> str:
    return frozen_difference(pack_frozen(1, here), pack_frozen(0, there), REGIONS)


def test_the_same_tensors_are_no_news() -> None:
    assert difference([*BASE, ROPE], [ROPE, *BASE]) == ""
    assert difference([], []) == ""


def test_tensors_that_differ_are_counted_and_the_first_ones_named_with_the_region() -> None:
    other = [replace(tensor, projection=tensor.projection + 5.0) for tensor in BASE]
    text = difference([*BASE, ROPE], [*other, ROPE])
    assert "not those of region eu, which began the run: of 5, 4 hold other values " in text
    assert "(layers.0.q.weight, layers.1.q.weight, ...)" in text
    assert "load and build the same" in text


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ([replace(ROPE, norm=5.0)], "1 hold other values (rope.inv_freq)"),
        ([replace(ROPE, shape=(64,))], "1 have another shape, or are on one side only (rope.inv_freq)"),
        ([], "1 have another shape, or are on one side only (rope.inv_freq)"),
        ([ROPE, replace(ROPE, name="more")], "1 have another shape, or are on one side only (more)"),
        ([replace(ROPE, kind="float16")], "1 are of another type (rope.inv_freq (float32 here, float16 there))"),
    ],
)
def test_each_kind_of_difference_has_its_words(other: list[FrozenTensor], words: str) -> None:
    assert words in difference([*BASE, ROPE], [*BASE, *other])


@pytest.mark.parametrize(
    ("other", "is_told"),
    [
        (replace(ROPE, projection=1.5 * (1 + 1e-6)), False),  # another machine's cosine
        (replace(ROPE, projection=1.5 + 4.0 * 2.0**-12), True),
        (replace(ROPE, projection=1.5 + 4.0 * 2.0**-9, kind="bfloat16"), False),  # rounded: only the type is told
        (replace(ROPE, projection=float("nan"), norm=float("inf")), False),  # a mask
    ],
)
def test_rounding_is_no_other_value(other: FrozenTensor, is_told: bool) -> None:
    assert ("hold other values" in difference([other], [ROPE])) is is_told


def test_a_base_that_one_region_has_quantised_is_no_alarm() -> None:
    codes = [replace(tensor, kind="uint8", shape=(16, 1), projection=900.0, norm=700.0) for tensor in BASE]
    scales = [replace(ROPE, name=f"layers.{n}.q.absmax", kind="float16") for n in range(4)]
    assert difference([*codes, *scales, ROPE], [*BASE, ROPE]) == ""
    assert difference([*BASE, ROPE], [*codes, *scales, ROPE]) == ""
    near = [replace(tensor, projection=tensor.projection + 1.0) for tensor in codes]
    assert difference(codes, near) == "", "a few codes of another device"
    other = [replace(tensor, projection=-900.0) for tensor in codes]
    assert "4 hold other values" in difference(codes, other), "of another base"


def test_very_many_tensors_are_summed_by_name() -> None:
    experts = [FrozenTensor(f"layers.{n}.w", "bfloat16", (8, 4), 9 * sin(n), 10 + sin(-n)) for n in range(12_000)]
    assert len(pack_frozen(0, experts)) <= LISTING_BYTES_MAX
    assert difference(experts, experts) == ""
    other = [replace(tensor, projection=-tensor.projection) for tensor in experts]
    assert "of 1, 1 hold other values (layers.#.w[8, 4])" in difference(experts, other)
    one = [*experts[:-1], replace(experts[-1], projection=-99e3)]
    assert "hold other values" in difference(one, experts)


def test_too_many_to_list_and_a_run_without_a_listing_are_told() -> None:
    letters = [chr(97 + n % 26) * (1 + n // 26 % 700) + chr(97 + n // 7 % 26) for n in range(30_000)]
    many = [FrozenTensor(name, "bfloat16", (n,), n * 0.1, n * 0.3) for n, name in enumerate(letters)]
    packed = pack_frozen(0, many)
    assert len(packed) <= LISTING_BYTES_MAX
    assert "not compared" in frozen_difference(packed, packed, REGIONS)
    assert "not compared" in frozen_difference(pack_frozen(1, BASE), b"", REGIONS)
    assert frozen_difference(pack_frozen(1, []), b"", REGIONS) == "", "there is nothing to compare"
    assert frozen_difference(b"", pack_frozen(0, BASE), REGIONS) == "", "a learner that tells nothing"


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"[",
        b"7",
        b"[0]",
        b"[0,7]",
        b"[0,[[1]]]",
        b'[0,[["a","float32",[1],"x",1]]]',
        b"[-1,[]]",
        b"[99,[]]",
        b"[" * 5000,
        b'[0,[["a","float32",[1e999],0,1]]]',
    ],
)
def test_garbage_of_another_region_is_no_crash(document: bytes) -> None:
    own = pack_frozen(1, BASE)
    for listing in (document, zlib.compress(document)):
        assert "not compared" in frozen_difference(own, listing, REGIONS)


def test_names_of_another_region_are_escaped_and_cut() -> None:
    rows = [["\x1b[31m" + "x" * 9999, "float32", [1], 0.0, 1.0]]
    listing = zlib.compress(json.dumps([0, rows]).encode())
    text = frozen_difference(pack_frozen(1, []), listing, REGIONS)
    assert "\x1b" not in text
    assert len(text) < 700


@pytest.mark.parametrize(
    "content", [["x", []], [None, []], [1e999, []], [True, []], [99, [["b", "float32", [2], 1, 1]]], [-5, []], [0]]
)
def test_a_listing_in_the_ledger_may_be_anything(content: object) -> None:
    listing = zlib.compress(json.dumps(content).encode())
    assert "are not compared" in frozen_difference(pack_frozen(1, BASE), listing, REGIONS)
    assert frozen_difference(pack_frozen(1, []), listing, REGIONS) == ""

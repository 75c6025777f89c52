"""wire/tensor_listing.py: of two models the tensors that differ are named, and nothing that a peer sends does harm."""

import json
import random
import zlib

import pytest

from diloco_node.core.bounds import LISTING_BYTES_MAX
from diloco_node.core.merge.fragments import TensorSpec
from diloco_node.core.types import MergeRule
from diloco_node.wire.tensor_listing import pack_tensors, tensor_difference

OURS = [TensorSpec(f"blocks.{at}.weight", (4, 4)) for at in range(300)]


def difference(*theirs: TensorSpec) -> str:
    return tensor_difference(pack_tensors(OURS), pack_tensors(theirs))


@pytest.mark.parametrize(
    ("theirs", "text"),
    [
        (
            [TensorSpec(spec.name.replace("blocks.7.", "blocks.7.base."), spec.shape) for spec in OURS],
            "the models differ: tensor blocks.7.weight is only here, tensor blocks.7.base.weight is only there",
        ),
        (OURS[:-1], "the models differ: tensor blocks.299.weight is only here"),
        ([*OURS, TensorSpec("z", ())], "the models differ: tensor z is only there"),
        (
            [TensorSpec("blocks.0.weight", (4, 5)), *OURS[1:]],
            "the models differ: tensor blocks.0.weight is [4, 4] (rda) here, [4, 5] (rda) there",
        ),
        (
            [TensorSpec("blocks.0.weight", (4, 4), MergeRule.AVG), *OURS[1:]],
            "the models differ: tensor blocks.0.weight is [4, 4] (rda) here, [4, 4] (avg) there",
        ),
        (OURS[::-1], ""),
    ],
)
def test_the_first_tensors_that_differ_are_named(theirs: list[TensorSpec], text: str) -> None:
    assert difference(*theirs) == text


def test_a_model_of_some_thousand_tensors_fits_and_a_larger_one_names_nothing() -> None:
    experts = [
        TensorSpec(f"model.layers.{at // 64}.mlp.experts.{at % 64}.gate_proj.weight", (8, 4)) for at in range(4096)
    ]
    assert 0 < len(pack_tensors(experts)) <= LISTING_BYTES_MAX
    draw = random.Random(1).getrandbits
    unlike = [TensorSpec(f"{draw(256):064x}", (8, 4)) for _ in range(4096)]
    assert pack_tensors(unlike) == b""
    assert tensor_difference(pack_tensors(OURS), pack_tensors(unlike)) == ""


@pytest.mark.parametrize(
    "listing",
    [
        b"",
        b"none",
        zlib.compress(b"[" * 100_000),
        zlib.compress(b"7"),
        zlib.compress(b'[["a"]]'),
        zlib.compress(b"[1, 2]"),
        zlib.compress(bytes(64 << 20), 9)[:LISTING_BYTES_MAX],
        zlib.compress(b'{"a": 1}')[:-3],
    ],
    ids=["empty", "none", "deep", "number", "short", "numbers", "bomb", "cut"],
)
def test_what_is_no_listing_names_nothing(listing: bytes) -> None:
    assert tensor_difference(pack_tensors(OURS), listing) == ""
    assert tensor_difference(listing, pack_tensors(OURS)) == ""


def test_what_a_peer_says_is_escaped_and_short() -> None:
    rows = [["\x1b[2J" + "y" * 4000, ["\x07" * 4000], "z" * 4000]]
    text = tensor_difference(pack_tensors(OURS), zlib.compress(json.dumps(rows).encode()))
    assert text.isprintable()
    assert len(text) < 700

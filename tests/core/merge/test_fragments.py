import os
import random
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_node.core.merge.fragments import FRAGMENTS_MAX, RANK_MAX, Manifest, TensorSpec, build_manifest
from diloco_node.core.types import MergeRule
from diloco_node.errors import ConfigError

shapes = st.lists(st.integers(1, 40), min_size=0, max_size=3).map(tuple)


@st.composite
def models(draw: st.DrawFn) -> list[TensorSpec]:
    names = draw(st.lists(st.text("abc.01", min_size=1, max_size=6), min_size=1, max_size=12, unique=True))
    rules = st.sampled_from(list(MergeRule))
    return [TensorSpec(name, draw(shapes), draw(rules)) for name in names]


def gpt(layers: int, dim: int, vocabulary: int, context: int) -> list[TensorSpec]:
    specs = [
        TensorSpec("wte.weight", (vocabulary, dim), MergeRule.AVG),
        TensorSpec("wpe.weight", (context, dim), MergeRule.AVG),
        TensorSpec("ln_f.weight", (dim,)),
    ]
    for layer in range(layers):
        specs += [
            TensorSpec(f"h.{layer}.attn.qkv.weight", (3 * dim, dim)),
            TensorSpec(f"h.{layer}.attn.proj.weight", (dim, dim)),
            TensorSpec(f"h.{layer}.mlp.up.weight", (4 * dim, dim)),
            TensorSpec(f"h.{layer}.mlp.down.weight", (dim, 4 * dim)),
            TensorSpec(f"h.{layer}.ln_1.weight", (dim,)),
            TensorSpec(f"h.{layer}.ln_2.weight", (dim,)),
        ]
    return specs


def most_fragments(specs: list[TensorSpec], fragments_max: int) -> Manifest:
    """The manifest with as many fragments as the model allows, up to `wanted`."""
    for fragments in range(fragments_max, 1, -1):
        try:
            return build_manifest(specs, fragments)
        except ConfigError:
            continue
    return build_manifest(specs, 1)


def test_a_small_model_is_cut_as_by_hand() -> None:
    # 22 values in 2 fragments: a fragment is 11, so the embedding of 12 gives 10 (5 rows of 2) and 2.
    # Largest first: wte[0:5] (10) -> 0, up (6) -> 1, down (3) -> 1 (6 < 10), wte[5:6] (2) -> 1 (9 < 10), bias (1) -> 0
    # (10 < 11).
    manifest = build_manifest(
        [
            TensorSpec("up", (3, 2)),
            TensorSpec("wte", (6, 2), MergeRule.AVG),
            TensorSpec("bias", ()),
            TensorSpec("down", (3,)),
        ],
        2,
    )
    assert [spec.name for spec in manifest.tensors] == ["bias", "down", "up", "wte"]
    cut = [
        [(p.name, p.tensor, p.row_start, p.row_stop, p.value_start, p.value_stop, p.offset, p.merge) for p in f.pieces]
        for f in manifest.fragments
    ]
    assert cut == [
        [("bias", 0, 0, 1, 0, 1, 0, MergeRule.RDA), ("wte", 3, 0, 5, 0, 10, 1, MergeRule.AVG)],
        [
            ("down", 1, 0, 3, 0, 3, 0, MergeRule.RDA),
            ("up", 2, 0, 3, 0, 6, 3, MergeRule.RDA),
            ("wte", 3, 5, 6, 10, 12, 9, MergeRule.AVG),
        ],
    ]
    assert [fragment.size for fragment in manifest.fragments] == [11, 11]
    assert manifest.fragments[1].piece_sizes == (3, 6, 2)
    assert manifest.fragments[0].rules == (MergeRule.RDA, MergeRule.AVG)
    assert manifest.size == 22


def test_a_tensor_as_large_as_a_fragment_stays_whole_and_a_larger_one_is_split() -> None:
    whole = build_manifest([TensorSpec("a", (5000, 4)), TensorSpec("b", (5000, 4))], 2)
    assert [len(fragment.pieces) for fragment in whole.fragments] == [1, 1]
    # 20,004 of 20,002: slabs of a quarter, 5,000 values.
    split = build_manifest([TensorSpec("a", (5001, 4)), TensorSpec("b", (5000, 4))], 2)
    assert sorted(p.size for f in split.fragments for p in f.pieces) == [4, 5000, 5000, 5000, 5000, 20_000]
    # A fragment of 3 values in 2 is 2, not 1.
    odd = build_manifest([TensorSpec("a", (3,))], 2)
    assert [(p.row_start, p.row_stop) for f in odd.fragments for p in f.pieces] == [(0, 2), (2, 3)]


def test_the_digest_of_a_known_model_does_not_change() -> None:
    # A change here means that regions of two releases can't merge: bump the line "manifest 1" and say so.
    manifest = build_manifest(gpt(2, 8, 16, 4), 4)
    assert manifest.digest == "5c05dca29e5fb0972803f6c77f33b764479873d9470e8c78044d659575138708"


@given(models(), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_every_value_is_in_exactly_one_piece(specs: list[TensorSpec], fragments_max: int) -> None:
    manifest = most_fragments(specs, fragments_max)
    ranges: dict[str, list[tuple[int, int]]] = {}
    for fragment in manifest.fragments:
        offset = 0
        assert fragment.pieces
        for piece in fragment.pieces:
            spec = manifest.tensors[piece.tensor]
            assert piece.offset == offset
            assert (spec.name, spec.merge) == (piece.name, piece.merge)
            assert (piece.value_start, piece.value_stop) == (
                piece.row_start * spec.row_size,
                piece.row_stop * spec.row_size,
            )
            assert piece.size > 0
            offset += piece.size
            ranges.setdefault(piece.name, []).append((piece.value_start, piece.value_stop))
        assert fragment.size == offset
    assert sorted(ranges) == sorted(spec.name for spec in specs)
    for spec in specs:
        own = sorted(ranges[spec.name])
        assert own[0][0] == 0
        assert own[-1][1] == spec.size
        assert all(left[1] == right[0] for left, right in pairwise(own))


@given(models(), st.integers(1, 9))
@settings(max_examples=150, deadline=None)
def test_no_fragment_exceeds_the_mean_by_more_than_the_largest_piece(
    specs: list[TensorSpec], fragments_max: int
) -> None:
    manifest = most_fragments(specs, fragments_max)
    fragments = len(manifest.fragments)
    target = -(-manifest.size // fragments)
    pieces = [piece for fragment in manifest.fragments for piece in fragment.pieces]
    for piece in pieces:
        assert piece.size <= max(target, manifest.tensors[piece.tensor].row_size)
    largest = max(piece.size for piece in pieces)
    # Greedy: the last piece of the largest fragment went where there was at most the mean of the others.
    assert max(f.size for f in manifest.fragments) * fragments <= manifest.size + (fragments - 1) * largest


@given(models(), st.integers(1, 6), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_the_order_of_the_tensors_does_not_matter(
    specs: list[TensorSpec], fragments_max: int, order: random.Random
) -> None:
    shuffled = list(specs)
    order.shuffle(shuffled)
    assert most_fragments(shuffled, fragments_max) == most_fragments(specs, fragments_max)


@pytest.mark.parametrize("fragments", [2, 4, 8, 24])
def test_a_transformer_is_cut_close_to_the_mean(fragments: int) -> None:
    manifest = build_manifest(gpt(12, 96, 5000, 64), fragments)
    mean = manifest.size / fragments
    assert max(f.size for f in manifest.fragments) <= 1.11 * mean
    assert min(f.size for f in manifest.fragments) >= 0.95 * mean


def test_another_hash_seed_in_another_process_gives_the_same_digest() -> None:
    code = (
        "from diloco_node.core.merge.fragments import TensorSpec, build_manifest\n"
        "names = {'wte', 'up', 'down', 'bias', 'qkv', 'proj', 'head'}\n"
        "print(build_manifest([TensorSpec(n, (len(n), 7, 3)) for n in names], 3).digest)\n"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "33")
    }
    assert len(digests) == 1


def test_the_digest_depends_on_names_shapes_rules_and_layout() -> None:
    base = [TensorSpec("a", (4, 6)), TensorSpec("b", (6,)), TensorSpec("c", (2, 3), MergeRule.AVG)]
    variants = [
        build_manifest(base, 2),
        build_manifest(base, 3),
        build_manifest([TensorSpec("a", (6, 4)), *base[1:]], 2),
        build_manifest([base[0], TensorSpec("bb", (6,)), base[2]], 2),
        build_manifest([*base[:2], TensorSpec("c", (2, 3))], 2),
    ]
    assert len({manifest.digest for manifest in variants}) == len(variants)


@pytest.mark.parametrize(
    ("specs", "fragments", "message"),
    [
        ([], 1, "no trainable tensors"),
        ([TensorSpec("a", (2,)), TensorSpec("a", (3,))], 1, "'a' is listed twice"),
        ([TensorSpec("a", (2, 0))], 1, "holds no values"),
        ([TensorSpec("a", (-2, -3))], 1, "holds no values"),
        ([TensorSpec("", (2,))], 1, "is empty, not printable"),
        ([TensorSpec("a\nb", (2,))], 1, "not printable"),
        ([TensorSpec("a" * 513, (2,))], 1, "longer than 512"),
        ([TensorSpec("a", (1,) * (RANK_MAX + 1))], 1, "9 axes"),
        ([TensorSpec("a", (1 << 20, 1 << 21))], 1, "values; at most"),
        ([TensorSpec("a", (2,))], 0, "it must be from 1 to"),
        ([TensorSpec("a", (2,))], FRAGMENTS_MAX + 1, "it must be from 1 to"),
        ([TensorSpec("a", (1, 100)), TensorSpec("b", (2, 30))], 24, "gives only 3 pieces; set it to 3 or less"),
        ([TensorSpec(f"t{i}", ()) for i in range(65_537)], 1, "65537 trainable tensors"),
    ],
)
def test_bad_models_are_refused_with_what_is_wrong(specs: list[TensorSpec], fragments: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_manifest(specs, fragments)


def test_the_advice_of_a_refusal_works() -> None:
    specs = [TensorSpec("a", (1, 100)), TensorSpec("b", (2, 30))]
    assert len(build_manifest(specs, 3).fragments) == 3

"""layouts/shard_map.py: every value of every fragment belongs to one owner, however the model is cut over ranks."""

import itertools

import numpy as np
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from diloco_node.core.merge.fragments import TensorSpec, build_manifest
from diloco_node.errors import ConfigError, LearnerError
from diloco_node.learner.layouts.shard_map import Box, ShardMap, agreed, describe, whole_box

TENSORS = [
    TensorSpec("scalar", ()),
    TensorSpec("vector", (7,)),
    TensorSpec("matrix", (42, 6)),
    TensorSpec("cube", (3, 4, 5)),
]


def cuts(length: int, parts: int) -> list[tuple[int, int]]:
    """As torch chunks: the last ones smaller, or empty."""
    size = -(-length // parts)
    return [(min(at * size, length), min((at + 1) * size, length)) for at in range(parts)]


def boxes(shape: tuple[int, ...], mesh: dict[int, int]) -> list[Box]:
    """A tensor cut along axes into so many parts each; axes that it has not are left out."""
    axes = [cuts(length, mesh.get(axis, 1)) for axis, length in enumerate(shape)]
    return [
        Box(tuple(low for low, _ in parts), tuple(high - low for low, high in parts))
        for parts in itertools.product(*axes)
    ]


def held(meshes: dict[str, dict[int, int]], ranks: int, *, replicas: int = 1) -> list[dict[str, list[Box]]]:
    found: list[dict[str, list[Box]]] = [{} for _ in range(ranks)]
    shards = ranks // replicas
    for tensor in TENSORS:
        cut = boxes(tensor.shape, meshes.get(tensor.name, {}))
        for at in range(ranks):
            shard = at % shards
            found[at][tensor.name] = [cut[shard]] if len(cut) == shards else (cut if len(cut) == 1 else [])
            assert len(cut) in (1, shards), (tensor, len(cut))
    return found


LAYOUTS = {
    "one": ({}, 1, 1),
    "ddp": ({}, 3, 3),
    "fsdp of 4, uneven and empty": ({"vector": {0: 4}, "matrix": {0: 4}, "cube": {0: 4}}, 4, 1),
    "columns": ({"matrix": {1: 2}, "cube": {2: 2}, "vector": {0: 2}}, 2, 1),
    "fsdp and tensor parallel": ({"matrix": {0: 2, 1: 2}, "cube": {0: 2, 1: 2}, "vector": {0: 4}}, 4, 1),
    "hsdp": ({"matrix": {0: 2}, "cube": {0: 2}, "vector": {0: 2}}, 4, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fragments", [1, 3])
def test_owners_have_every_value_once(layout: str, fragments: int) -> None:
    meshes, ranks, replicas = LAYOUTS[layout]
    shards = ShardMap(TENSORS, held(meshes, ranks, replicas=replicas))
    rng = np.random.default_rng(0)
    whole = {tensor.name: rng.normal(size=tensor.shape) for tensor in TENSORS}
    for fragment in build_manifest(TENSORS, fragments).fragments:
        vector = np.full(fragment.size, np.nan)
        seen = 0
        for rank in range(ranks):
            for slab in shards.owned(fragment, rank).slabs:
                piece, values = slab.piece, whole[slab.piece.name]
                box = values[
                    tuple(slice(low, low + size) for low, size in zip(slab.box.offsets, slab.box.sizes, strict=True))
                ]
                target = vector[piece.offset : piece.offset + piece.size]
                view = target.reshape(-1, *values.shape[1:]) if values.shape else target.reshape(())
                assert view[slab.inside].shape == slab.shape == box[slab.local].shape
                view[slab.inside] = box[slab.local]
                seen += slab.size
        assert seen == fragment.size
        for piece in fragment.pieces:
            expected = whole[piece.name].reshape(-1)[piece.value_start : piece.value_stop]
            assert np.array_equal(vector[piece.offset : piece.offset + piece.size], expected)
        assert sum(shards.owned(fragment, rank).size for rank in range(ranks)) == fragment.size


def test_replicas_follow_the_lowest_rank() -> None:
    meshes, ranks, replicas = LAYOUTS["hsdp"]
    shards = ShardMap(TENSORS, held(meshes, ranks, replicas=replicas))
    first, second = boxes((42, 6), {0: 2})
    assert (shards.owner("matrix", first), shards.followers("matrix", first)) == (0, (2,))
    assert (shards.owner("matrix", second), shards.followers("matrix", second)) == (1, (3,))
    assert shards.followers("scalar", Box((), ())) == (1, 2, 3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"matrix": [Box((0, 0), (41, 6))]}, "hold 246 of the 252 values of 'matrix'"),
        ({"matrix": [Box((0, 0), (42, 6)), Box((0, 0), (1, 6))]}, "parts of 'matrix' overlap"),
        ({"matrix": [Box((0, 0), (43, 6))]}, "has no part"),
        ({"matrix": [Box((0,), (42,))]}, "has no part"),
        ({"matrix": [Box((-1, 0), (42, 6))]}, "has no part"),
        ({"other": [Box((0,), (1,))]}, "'other', which rank 0's model does not have"),
        ({"scalar": []}, "hold 0 of the 1 values of 'scalar'"),
    ],
)
def test_parts_that_do_not_make_the_model_are_named(change: dict[str, list[Box]], reason: str) -> None:
    with pytest.raises(LearnerError, match=reason):
        ShardMap(TENSORS, [held({}, 1)[0] | change])


@pytest.mark.parametrize(
    ("ranks", "is_refused"),
    [
        ([{"embed": "a"}, {"head": "a"}], True),
        ([{"embed": "a"}, {"head": "b"}], False),
        ([{"embed": ""}, {"head": ""}], False),  # zeros
        ([{"embed": "a", "head": "a"}], False),  # two tensors that began alike
        ([{"embed": "a", "head": "a"}, {"embed": "a"}], False),
        ([{"embed": "a"}, {"embed": "a"}], False),
    ],
)
def test_a_weight_that_is_tied_across_stages_is_refused(ranks: list[dict[str, str]], is_refused: bool) -> None:
    said = []
    for marks in ranks:
        specs = [TensorSpec(name, (4, 2)) for name in marks]
        said.append(describe(specs, {spec.name: [whole_box(spec.shape)] for spec in specs}, marks))
    if not is_refused:
        agreed(said)
        return
    with pytest.raises(LearnerError, match=r"'embed' on rank 0 and 'head' on rank 1 .*Put both on one stage"):
        agreed(said)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_a_matrix_cut_in_any_way_is_covered_once(
    rows: int, columns: int, down: int, across: int, fragments: int
) -> None:
    tensor = TensorSpec("matrix", (rows, columns))
    cut = boxes(tensor.shape, {0: down, 1: across})
    shards = ShardMap([tensor], [{"matrix": [box]} for box in cut])
    try:
        made = build_manifest([tensor], fragments)
    except ConfigError:
        reject()
    counts = np.zeros((rows, columns), int)
    for fragment in made.fragments:
        for rank, box in enumerate(cut):
            for slab in shards.owned(fragment, rank).slabs:
                assert slab.box == box
                rows_of = slice(slab.inside[0].start + slab.piece.row_start, slab.inside[0].stop + slab.piece.row_start)
                counts[rows_of, slab.inside[1]] += 1
    assert (counts == 1).all()

"""A region whose ranks hold parts of the model is the same learner as one that has it whole: bit for bit.

Real ranks over Gloo, with PyTorch's own ways to cut a model, under one fake daemon (tests/kit/shard_ranks.py).
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from diloco_node.core.types import Codec
from tests.kit.fake_daemon import Done, FakeDaemon, MemoryStore
from tests.kit.shard_ranks import Ranks, states

pytestmark = pytest.mark.e2e

ROUNDS = 20
LAYOUTS = {
    2: ["ddp", "fsdp", "tp", "offload", "fsdp-masters", "pipeline"],
    3: ["fsdp"],  # shards of 14, 14 and 14 rows, of 4, 4 and 3, and of 1, 1 and 1
    4: ["fsdp", "hsdp", "fsdp-tp"],  # with empty shards
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank comes to."""
    return states(1, ["whole", "whole-masters"], tmp_path_factory.mktemp("whole"), rounds=ROUNDS)


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_every_layout_comes_to_the_bits_of_one_rank(ranks: int, whole: dict[str, Any], tmp_path: Path) -> None:
    found = states(ranks, LAYOUTS[ranks], tmp_path, rounds=ROUNDS)
    for layout in LAYOUTS[ranks]:
        expected = whole["whole-masters" if layout.endswith("masters") else "whole"]
        # What is frozen on another stage is not in a stage's state.
        elsewhere = {"global frozen.weight", "global frozen.bias"} if layout == "pipeline" else set()
        for when in ("first", "last"):
            assert (
                found[layout][when].items()
                >= {name: digest for name, digest in expected[when].items() if name not in elsewhere}.items()
            ), (layout, when)
        assert expected["first"]["up.weight"] != expected["last"]["up.weight"]
        assert expected["last"]["frozen.weight"] == expected["first"]["frozen.weight"]


def test_what_the_daemon_gets_from_shards_is_what_it_gets_from_one_rank(tmp_path: Path) -> None:
    encoded = []
    for count, layout in ((1, "whole"), (2, "fsdp")):
        folder = tmp_path / layout
        folder.mkdir()
        with Ranks(count) as ranks, MemoryStore(folder / "memory.sock"), FakeDaemon(folder, codec=Codec.INT4) as daemon:
            ranks.attach(layout, folder)
            ranks.merged(daemon, 4, applied=2)
            encoded.append([daemon.encoded(fragment) for fragment in range(2)])
            assert [part.tobytes() for part in daemon.theta]
            ranks.ask(do="close")
    assert encoded[0] == encoded[1]


def test_a_region_that_returns_with_other_ranks_goes_on_with_its_moments(tmp_path: Path) -> None:
    """Two ranks, FSDP2; then four on a two-dimensional mesh; then one; then two again, that hold all of it."""
    kept: dict[str, str] = {}
    theta, versions, global_step = None, None, 0
    with MemoryStore(tmp_path / "memory.sock"):
        for at, (count, layout) in enumerate([(2, "fsdp"), (4, "fsdp-tp"), (1, "whole"), (2, "ddp"), (2, "fsdp")]):
            with Ranks(count) as ranks, FakeDaemon(tmp_path, theta=theta, versions=versions) as daemon:
                ranks.attach(layout, tmp_path, optimizer=True)
                if at:
                    assert ranks.moments() == kept, layout
                    assert all(one["global_step"] >= global_step for one in ranks.ask(do="where"))
                ranks.merged(daemon, 2, applied=2)
                kept = ranks.moments()
                global_step = ranks.ask(do="where")[0]["global_step"]
                assert {name.split()[1] for name in kept} == {"step", "exp_avg", "exp_avg_sq"}
                ranks.ask(do="close")
                theta, versions = daemon.theta, daemon.versions


def test_the_same_ranks_go_on_with_what_is_each_ones_own(tmp_path: Path) -> None:
    places = []
    theta, versions = None, None
    for _ in range(2):
        with (
            MemoryStore(tmp_path / "memory.sock"),
            Ranks(2) as ranks,
            FakeDaemon(tmp_path, theta=theta, versions=versions) as daemon,
        ):
            ranks.attach("fsdp", tmp_path, optimizer=True)
            places.append([one["position"] for one in ranks.ask(do="where")])
            ranks.ask(do="step", count=3)
            ranks.ask(do="close")
            theta, versions = daemon.theta, daemon.versions
    assert places == [[0, 0], [30, 33]]
    names = sorted(path.name.rpartition("-00000")[2] for path in (tmp_path / "learner" / "checkpoints").iterdir())
    assert len(names) == 4, "two of each rank"


def test_a_checkpoint_that_lacks_a_rank_is_none(tmp_path: Path) -> None:
    theta, versions = None, None
    first: dict[str, str] = {}
    for at in range(2):
        with (
            MemoryStore(tmp_path / "memory.sock"),
            Ranks(2) as ranks,
            FakeDaemon(tmp_path, theta=theta, versions=versions) as daemon,
        ):
            ranks.attach("fsdp", tmp_path, optimizer=True)
            if at:
                assert ranks.moments() == first, "the one before"
                assert [one["position"] for one in ranks.ask(do="where")] == [20, 22]
            else:
                ranks.ask(do="step", count=2)
                first = ranks.moments()
                ranks.ask(do="checkpoint")
                ranks.ask(do="step", count=2)
                assert ranks.moments() != first
            ranks.ask(do="close")
            theta, versions = daemon.theta, daemon.versions
        newest = max((tmp_path / "learner" / "checkpoints").glob("*-00001-of-00002.safetensors"))
        newest.write_bytes(newest.read_bytes()[:-1])


def test_versions_reach_a_model_that_an_evaluation_has_left_unsharded(tmp_path: Path) -> None:
    seen = []
    for count, layout in ((1, "whole"), (2, "fsdp")):
        folder = tmp_path / layout
        folder.mkdir()
        with Ranks(count) as ranks, MemoryStore(folder / "memory.sock"), FakeDaemon(folder) as daemon:
            ranks.attach(layout, folder)
            before = ranks.ask(do="evaluate")
            applied = 2
            for _ in range(3):
                applied = ranks.merged(daemon, 2, applied=applied)
                seen.append(ranks.ask(do="evaluate")[0])
            assert seen[-1] != before[0]
            ranks.ask(do="close")
    assert seen[:3] == seen[3:]


def test_a_region_of_which_another_rank_was_asked_to_stop_is_not_done(tmp_path: Path) -> None:
    with Ranks(2) as ranks, MemoryStore(tmp_path / "memory.sock"), FakeDaemon(tmp_path) as daemon:
        ranks.attach("ddp", tmp_path)
        ranks.processes[1].terminate()
        ranks.ask(do="step", count=1)
        ranks.ask(do="close")
        assert not [one for one in daemon.said if isinstance(one, Done)]


def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    with Ranks(2) as ranks, MemoryStore(tmp_path / "memory.sock"), FakeDaemon(tmp_path):
        ranks.attach("fsdp", tmp_path)
        ranks.ask(do="step", count=1)
        ranks.processes[1].kill()
        ranks.processes[1].wait()
        first = ranks.processes[0]
        assert first.stdin is not None
        first.stdin.write('{"do": "step", "count": 1}\n')
        first.stdin.flush()
        assert first.wait(120) == 1, "for torchrun to start all of them again"


def test_a_rank_that_loses_another_one_says_so(tmp_path: Path) -> None:
    with Ranks(2) as ranks, MemoryStore(tmp_path / "memory.sock"), FakeDaemon(tmp_path):
        ranks.attach("fsdp", tmp_path)
        ranks.ask(do="step", count=1)
        ranks.processes[1].kill()
        ranks.processes[1].wait()
        error = ranks.ask_one(0, do="fail", at="step", count=1)["error"]
        assert "another rank of this region has ended" in error
        assert "Its own log says why" in error


@pytest.mark.parametrize(
    ("call", "named"), [("settle", r"settle\(\) waits for all ranks"), ("state", "of a model in parts")]
)
def test_what_all_ranks_have_to_call_is_not_waited_for_without_end(call: str, named: str, tmp_path: Path) -> None:
    with Ranks(2) as ranks, MemoryStore(tmp_path / "memory.sock"), FakeDaemon(tmp_path):
        ranks.attach("pipeline", tmp_path)
        error = ranks.ask_one(0, do="fail", at=call, meet_s=1.0)["error"]
        assert re.search(named, error), error
        assert "Ranks 1 failed" in error, "which one is missing"


def test_a_daemon_that_comes_back_while_ranks_wait_for_one_another_is_answered(tmp_path: Path) -> None:
    with Ranks(2) as ranks, MemoryStore(tmp_path / "memory.sock"):
        with FakeDaemon(tmp_path) as daemon:
            ranks.attach("ddp", tmp_path)
            ranks.ask(do="step", count=2)
            ranks.tell_one(0, do="step", count=1)
            time.sleep(0.3)  # it waits for rank 1, which is elsewhere
        with FakeDaemon(tmp_path, theta=daemon.theta, versions=daemon.versions) as daemon:
            assert daemon.wait_attached().step == 2
            ranks.tell_one(1, do="step", count=1)
            ranks.answers()
            assert ranks.merged(daemon, 2) == 2, "and what it asks for is done"
            ranks.ask(do="close")

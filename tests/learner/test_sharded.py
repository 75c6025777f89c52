"""A region whose ranks hold parts of the model is the same learner as one that has it whole: bit for bit.

Real ranks over Gloo, with PyTorch's own ways to cut a model, under one fake daemon (tests/kit/shard_ranks.py).
"""

import json
import os
import re
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diloco_node.core.types import Codec
from diloco_node.learner.checkpoint import newest_first
from diloco_node.shared_memory import PLACE_AREA, PLACE_BYTES, MemoryStore, PlaceMark, request_area
from diloco_node.storage.trained import read_trained
from diloco_node.wire.frozen_listing import frozen_difference, pack_frozen
from diloco_node.wire.learner_link import EndWanted, Failed, OfferApplied, RunAdvanced, SnapshotReady, Warned
from tests.kit.fake_daemon import PATIENCE_S, Done, FakeDaemon
from tests.kit.shard_layouts import cut
from tests.kit.shard_ranks import Groups, Ranks, digest, run_program, states

pytestmark = pytest.mark.e2e

ROUNDS = 8
"""In each half a round of each fragment; in the first one of each fragment with the learner, and one without it."""
LAYOUTS = {
    2: ["ddp", "fsdp", "tp", "offload", "fsdp-masters", "pipeline", "frozen stage", "experts"],
    3: ["fsdp"],  # shards of 14, 14 and 14 rows, of 4, 4 and 3, and of 1, 1 and 1
    4: ["fsdp-tp", "experts", "fsdp-experts"],  # with empty shards
    8: ["fsdp", "hsdp"],  # with empty shards; two copies of four parts each
}
ELSEWHERE = {
    "pipeline": {"global frozen.weight", "global frozen.bias"},
    "frozen stage": {"global lm_head.weight"},
}
"""What is frozen, or tied, on another stage is not in a stage's state."""
RETURNS = [
    (2, "fsdp"),
    (4, "fsdp-tp"),
    (1, "whole"),
    (2, "ddp"),
    (4, "hsdp"),
    (2, "offload"),
    (3, "fsdp"),
    (2, "pipeline"),
    (4, "fsdp-experts"),
    (2, "tp"),
    (4, "experts"),
    (2, "fsdp-masters"),
    (2, "experts"),
    (4, "fsdp"),
    (2, "fsdp"),
]
"""Each is once what a region comes back with, and once what it was before."""

SOME_RETURNS = [(2, "fsdp"), (4, "fsdp-tp"), (1, "whole"), (2, "pipeline"), (4, "experts"), (2, "fsdp-masters")]
"""One layout of each kind. Devices in software have more (tests/learner/layouts/test_device.py)."""


LOOP = """
import hashlib, json, os, sys, time
import torch, torch.distributed as dist
from torch import nn
import diloco_node
os.environ["DILOCO_SOCKET"], os.environ["DILOCO_SUPERVISOR"] = sys.argv[3:]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7 + rank)                      # different parameters before attach
model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)).to(getattr(torch, sys.argv[1]))
if sys.argv[2] == "odd":
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
def digest():
    data = b"".join(p.detach().float().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(data).hexdigest()
seen, run = [], []
with diloco_node.attach(model, optimizer) as diloco:
    seen.append(digest())
    while not diloco.should_stop:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        optimizer.step()
        diloco.step(tokens=3 + rank)
        seen.append(digest())
        run.append((diloco.global_step, diloco.progress))
        time.sleep(0.001)
    print(json.dumps({"rank": rank, "seen": seen, "run": run, "steps": diloco.steps, "tokens": diloco.tokens,
                      "region": diloco.region, "regions": diloco.regions, "index": diloco.region_index}), flush=True)
dist.destroy_process_group()
"""
"""A training script of a rank."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, groups: Groups) -> dict[str, Any]:
    """What one rank comes to."""
    folder = tmp_path_factory.mktemp("whole")
    return states(1, ["whole", "whole-masters"], folder, rounds=ROUNDS, groups=groups)


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_every_layout_comes_to_the_bits_of_one_rank(
    ranks: int, whole: dict[str, Any], groups: Groups, tmp_path: Path
) -> None:
    found = states(ranks, LAYOUTS[ranks], tmp_path, rounds=ROUNDS, groups=groups)
    for layout in LAYOUTS[ranks]:
        expected = whole["whole-masters" if layout.endswith("masters") else "whole"]
        elsewhere = ELSEWHERE.get(layout, set())
        for when in ("first", "last"):
            assert (
                found[layout][when].items()
                >= {name: digest for name, digest in expected[when].items() if name not in elsewhere}.items()
            ), (layout, when)
        assert found[layout]["seen"] == expected["seen"], layout
        assert found[layout]["sent"] == expected["sent"], layout
        assert frozen_difference(found[layout]["listing"], expected["listing"], ("eu",)) == "", layout
        # Weight and bias of a layer, and a buffer.
        assert "of 3, 3 have" in frozen_difference(found[layout]["listing"], pack_frozen(0, []), ("eu",)), layout
    before, after = whole["whole"]["first"], whole["whole"]["last"]
    for name in ("up.weight", "experts.weight", "experts.load"):
        assert before[name] != after[name]
    assert before["frozen.weight"] == after["frozen.weight"]
    assert len({one["small"] for one in whole["whole"]["seen"]}) == 3


@pytest.mark.parametrize("returns", [SOME_RETURNS, pytest.param(RETURNS, marks=pytest.mark.long)], ids=["some", "all"])
def test_a_region_goes_on_with_its_moments_restarted_as_it_was_or_with_other_ranks(
    returns: list[tuple[int, str]], groups: Groups, tmp_path: Path
) -> None:
    kept: dict[str, str] = {}
    places: list[dict[str, Any]] = []
    theta, versions, global_step = None, None, 0
    with MemoryStore(tmp_path / "memory.sock"), ExitStack() as stack:
        regions = {count: stack.enter_context(groups.take(count)) for count in sorted({count for count, _ in returns})}
        for at, (count, layout) in enumerate(returns):
            ranks = regions[count]
            for life in ("comes", "restarts"):
                with FakeDaemon(tmp_path, theta=theta, versions=versions) as daemon:
                    ranks.attach(layout, tmp_path, optimizer=True)
                    if life == "restarts":
                        assert [one["position"] for one in ranks.ask(do="where")] == places, "each rank's own"
                    if at or life == "restarts":
                        assert ranks.moments() == kept, (layout, life)
                        assert all(one["global_step"] >= global_step for one in ranks.ask(do="where"))
                    if life == "comes":
                        ranks.merged(daemon, 2, applied=2)
                        assert ranks.moments() != kept
                    kept = ranks.moments()
                    places = [one["position"] for one in ranks.ask(do="where")]
                    global_step = ranks.ask(do="where")[0]["global_step"]
                    ranks.ask(do="close")
                    theta, versions = daemon.theta, daemon.versions
            assert len(set(places)) == count, "each rank has come to another place"
        assert {name.split()[1] for name in kept} == {"step", "exp_avg", "exp_avg_sq"}
        assert {name.split()[0] for name in kept} >= {"embed_tokens.weight", "experts.weight"}


def test_a_checkpoint_that_lacks_a_rank_is_none(groups: Groups, tmp_path: Path) -> None:
    theta, versions = None, None
    first: dict[str, str] = {}
    folder = tmp_path / "learner" / "checkpoints"
    with MemoryStore(tmp_path / "memory.sock"), groups.take(2) as ranks:
        for at in range(2):
            with FakeDaemon(tmp_path, theta=theta, versions=versions) as daemon:
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
            assert len(list(folder.glob("*.safetensors"))) == 4, "two of each rank"
            newest = max(folder.glob("*-00001-of-00002.safetensors"))
            newest.write_bytes(newest.read_bytes()[:-1])


def test_ranks_that_were_asked_to_stop_say_that_their_last_checkpoint_is_written(
    groups: Groups, tmp_path: Path
) -> None:
    with MemoryStore(tmp_path / "memory.sock"), groups.take(2) as ranks, FakeDaemon(tmp_path):
        ranks.attach("fsdp", tmp_path, optimizer=True)
        ranks.ask(do="step", count=2)
        pid = ranks.processes[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGTERM)
        ranks.ask(do="step", count=1)
        ranks.ask(do="close")
        mark = PlaceMark.decode(request_area(tmp_path / "memory.sock", PLACE_AREA, PLACE_BYTES)[:])
        assert mark is not None
        assert (mark.step, mark.checkpoint_step, mark.is_interrupted) == (3, 3, True)


def test_loops_in_generators_keep_a_last_checkpoint_though_no_rank_waits_for_another(
    groups: Groups, tmp_path: Path
) -> None:
    theta, versions = None, None
    kept: dict[str, str] = {}
    with MemoryStore(tmp_path / "memory.sock"), groups.take(2) as ranks:
        for at in range(2):
            with FakeDaemon(tmp_path, theta=theta, versions=versions) as daemon:
                ranks.attach("fsdp", tmp_path, optimizer=True)
                if at:
                    assert ranks.moments() == kept
                    assert [one["position"] for one in ranks.ask(do="where")] == [20, 22]
                ranks.ask(do="step", count=2)
                kept = ranks.moments()
                ranks.ask_one(1, do="abandon")
                ranks.ask_one(0, do="abandon")
                (told,) = [message.text for message in daemon.said if isinstance(message, Warned)]
                assert told == "the loop ended in a generator: the last steps of several ranks are merged nowhere"
                theta, versions = daemon.theta, daemon.versions


def test_a_version_is_applied_nowhere_before_every_rank_has_its_part(groups: Groups, tmp_path: Path) -> None:
    with groups.take(2) as ranks, MemoryStore(tmp_path / "memory.sock"), FakeDaemon(tmp_path) as daemon:
        ranks.attach("fsdp", tmp_path)
        ranks.ask(do="step", count=1)
        ranks.ask_one(1, do="hold")
        daemon.commit(0, daemon.theta[0] + np.float32(1.0), -1)
        places = ranks.ask(do="where")
        while places[0]["arrived"] != [0] and places[0]["versions"] == [0, 0]:
            ranks.ask(do="step", count=1)
            places = ranks.ask(do="where")
        ranks.ask(do="step", count=5)  # returns, though rank 1 waits for its part
        places = ranks.ask(do="where")
        assert [one["arrived"] for one in places] == [[0], []], "rank 0 has had its part all the time"
        assert [one["versions"] for one in places] == [[0, 0], [0, 0]]
        ranks.ask_one(1, do="release")
        while places[1]["versions"] != [1, 0]:
            ranks.ask(do="step", count=1)
            places = ranks.ask(do="where")
            assert places[0]["versions"] == places[1]["versions"], "at one boundary"
        ranks.ask(do="close")


def test_what_can_not_be_attached_is_said_on_all_ranks(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        for answer in ranks.ask(do="fail", at="attach", layout="tied stages", folder=str(tmp_path)):
            assert "'embed_tokens.weight' on rank 0 and 'lm_head.weight' on rank 1 begin with" in answer["error"]
            assert "Put both on one stage" in answer["error"]
            assert "attach(..., untied=('lm_head.weight',))" in answer["error"]
        with MemoryStore(tmp_path / "memory.sock"), FakeDaemon(tmp_path) as daemon:
            ranks.ask(do="attach", layout="tied stages", folder=str(tmp_path), untied=["lm_head.weight"])
            assert {"embed_tokens.weight", "lm_head.weight"} <= {one.name for one in daemon.wait_attached().tensors}
            ranks.ask(do="close")
        ranks.tell_one(0, do="fail", at="attach", layout="ddp", folder="")
        ranks.tell_one(1, do="fail", at="attach", layout="ddp", folder=str(tmp_path))
        for answer in ranks.answers():
            assert "DILOCO_SOCKET is set on rank 1, but not on rank 0" in answer["error"]
            assert "--node-rank 0" in answer["error"]


def test_a_region_of_which_another_rank_was_asked_to_stop_is_not_done(tmp_path: Path) -> None:
    with Ranks(2) as ranks, MemoryStore(tmp_path / "memory.sock"), FakeDaemon(tmp_path) as daemon:
        ranks.attach("ddp", tmp_path)
        ranks.processes[1].terminate()
        ranks.ask(do="step", count=1)
        ranks.ask(do="close")
        assert not [one for one in daemon.said if isinstance(one, Done)]


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_script_that_ends_its_process_group_before_the_block_is_done(layout: str, tmp_path: Path) -> None:
    with Ranks(2) as ranks, MemoryStore(tmp_path / "memory.sock"), FakeDaemon(tmp_path) as daemon:
        ranks.attach(layout, tmp_path, optimizer=True)
        ranks.ask(do="step", count=2)
        ranks.ask(do="end_group")
        error = ranks.ask_one(1, do="fail", at="settle")["error"]
        assert "call torch.distributed.destroy_process_group() after the `with` block" in error
        ranks.ask_one(0, do="finish")
        ranks.ask(do="close")
        assert daemon.wait_for(EndWanted).reason == "enough"
        assert daemon.wait_for(Done).step == 2
        folder = tmp_path / "learner" / "checkpoints"
        assert {(name.step, name.place.rank) for name in newest_first(folder)} >= {(2, 0), (2, 1)}


def test_a_stop_whose_last_merge_an_ended_process_group_prevents_is_told(tmp_path: Path) -> None:
    with Ranks(2) as ranks, MemoryStore(tmp_path / "memory.sock"), FakeDaemon(tmp_path) as daemon:
        ranks.attach("ddp", tmp_path)
        for process in ranks.processes:
            process.terminate()
        ranks.ask(do="step", count=1)
        ranks.ask(do="end_group")
        ranks.ask(do="close")
        assert "are in no merge: torch.distributed.destroy_process_group() was called" in daemon.wait_for(Warned).text


@pytest.mark.parametrize("layout", ["ddp", "fsdp", "fsdp-masters"])
def test_after_the_end_every_rank_holds_the_final_parameters(layout: str, groups: Groups, tmp_path: Path) -> None:
    with MemoryStore(tmp_path / "memory.sock"), FakeDaemon(tmp_path) as daemon, groups.take(2) as ranks:
        ranks.attach(layout, tmp_path, optimizer=layout != "fsdp-masters")
        ranks.merged(daemon, 2, applied=2)
        ranks.ask(do="step", count=2)  # of its own, after the last merge
        before = ranks.agreed(do="model_state")
        daemon.stop_learner(versions=tuple(daemon.versions))
        ranks.ask(do="step", count=2)  # the end is told in one of them, or in close()
        ranks.ask(do="close")
        after = ranks.agreed(do="model_state")
    assert daemon.manifest is not None
    parts: dict[str, dict[int, np.ndarray]] = {}
    for fragment, theta in zip(daemon.manifest.fragments, daemon.theta, strict=True):
        for piece in fragment.pieces:
            values = theta[piece.offset : piece.offset + piece.size]
            parts.setdefault(piece.name, {})[piece.value_start] = values
    kinds = {
        name: value.dtype
        for name, value in cut("whole-masters" if layout.endswith("masters") else "whole")[0].state_dict().items()
    }
    for name, values in parts.items():
        whole = np.concatenate([values[start] for start in sorted(values)])
        assert after[name] == digest(torch.from_numpy(whole).to(kinds[name])), name
        assert after[name] != before[name], name


@pytest.mark.parametrize("layout", ["fsdp", "tp"])
def test_a_sharded_second_model_is_filled_with_the_global_parameters(
    layout: str, groups: Groups, tmp_path: Path
) -> None:
    with MemoryStore(tmp_path / "memory.sock"), FakeDaemon(tmp_path) as daemon, groups.take(2) as ranks:
        ranks.attach(layout, tmp_path, optimizer=True)
        ranks.merged(daemon, 2, applied=2)
        ranks.ask(do="step", count=2)  # of its own, after the last merge
        own = ranks.agreed(do="model_state")
        first, other = ranks.ask(do="fill_second", layout=layout)
        assert other["state"] == {}
        assert first["second"] == other["second"] == first["state"]
        assert own["up.weight"] != first["state"]["up.weight"]
        assert ranks.agreed(do="model_state") == own, "the region's own parameters stay"
        ranks.ask(do="step", count=1)
        ranks.ask(do="close")


def test_a_rank_that_dies_ends_the_others(tmp_path: Path) -> None:
    with Ranks(2) as ranks, MemoryStore(tmp_path / "memory.sock"), FakeDaemon(tmp_path):
        ranks.attach("fsdp", tmp_path)
        ranks.ask(do="step", count=1)
        ranks.processes[1].kill()
        ranks.processes[1].join()
        ranks.tell_one(0, do="step", count=1)
        ranks.processes[0].join(120)
        assert ranks.processes[0].exitcode == 1, "for torchrun to start all of them again"


def test_a_rank_that_loses_another_one_says_so(tmp_path: Path) -> None:
    with Ranks(2) as ranks, MemoryStore(tmp_path / "memory.sock"), FakeDaemon(tmp_path):
        ranks.attach("fsdp", tmp_path)
        ranks.ask(do="step", count=1)
        ranks.processes[1].kill()
        ranks.processes[1].join()
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


def test_a_daemon_that_comes_back_while_ranks_wait_for_one_another_is_answered(groups: Groups, tmp_path: Path) -> None:
    with groups.take(2) as ranks, MemoryStore(tmp_path / "memory.sock"):
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


@pytest.mark.parametrize(("count", "layout"), [(2, "ddp"), (2, "tp"), (4, "hsdp")])
def test_ranks_that_do_not_add_up_their_gradients_are_refused_before_a_snapshot(
    count: int, layout: str, groups: Groups, tmp_path: Path
) -> None:
    with groups.take(count) as ranks, MemoryStore(tmp_path / "memory.sock"), FakeDaemon(tmp_path) as daemon:
        ranks.attach(layout, tmp_path)
        ranks.ask(do="step", count=3)
        ranks.ask(do="step", count=1, apart=1e-4)  # roundings of copies that each computes by itself
        ranks.ask(do="step", count=3, apart=1.0)
        daemon.want(0)
        errors = {answer["error"] for answer in ranks.ask(do="fail", at="step", count=1, apart=1.0)}
        assert len(errors) == 1, "all ranks say the same"
        error = errors.pop()
        assert re.search(r"copies of '\S+' have come apart by step 8, by .* the DistributedDataParallel module", error)
        ranks.ask(do="close")
        assert "have come apart" in daemon.wait_for(Failed).reason
        assert not [message for message in daemon.said if isinstance(message, SnapshotReady)]


@pytest.mark.parametrize(("dtype", "defaults"), [("bfloat16", ""), ("float32", "odd")])
def test_two_ranks_stay_equal_through_merges(tmp_path: Path, dtype: str, defaults: str) -> None:
    place = f"{tmp_path}/learner.sock", f"{tmp_path}/memory.sock"
    with (
        MemoryStore(tmp_path / "memory.sock"),
        FakeDaemon(tmp_path, codec=Codec.FP32) as daemon,
        Ranks(2, run_program, LOOP, dtype, defaults, *place) as ranks,
    ):
        daemon.wait_for(OfferApplied, 2)
        for version in range(1, 4):
            daemon.send(RunAdvanced(1000 * version, version / 4))
            daemon.want(0)
            ready = daemon.wait_for(SnapshotReady, version)
            merged = daemon.theta[0] - daemon.decoded(0) + 0.5
            daemon.commit(0, merged, ready.contribution.snapshot if version != 2 else -1)
            daemon.wait_for(OfferApplied, 2 + version)
        time.sleep(0.05)
        daemon.stop_learner()
        answers = [json.loads(answer) for answer in ranks.answers()]
        done = daemon.wait_for(Done)
        for process in ranks.processes:
            process.join(PATIENCE_S)
            assert process.exitcode == 0
    first, second = sorted(answers, key=lambda answer: answer["rank"])
    assert first["seen"] == second["seen"]
    assert len(set(first["seen"])) > 4
    assert first["run"] == second["run"], "one learning rate on all ranks"
    assert {0.25, 0.5, 0.75} <= {part for _, part in first["run"]}
    assert first["run"][-1][0] >= 3000
    for answer in (first, second):
        assert answer["steps"] == done.step
        assert answer["tokens"] == 7 * answer["steps"]  # 3 and 4 of the two ranks
        assert (answer["region"], answer["regions"], answer["index"]) == ("us-east", 3, 1)
    assert done.tokens == 7 * done.step
    assert read_trained(tmp_path)[0].tokens == done.tokens
    assert len(daemon.attaches) == 1

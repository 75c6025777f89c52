"""The report is put together from what regions left on disk, and says so when that does not fit together."""

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco_node.core.ledger.entries import seal
from diloco_node.core.types import DiskNamedBody, LearnerStatus, RunSettings
from diloco_node.daemon import node as node_module
from diloco_node.daemon.admin.status_document import write_report
from diloco_node.daemon.manifest_file import MANIFEST_NAME, save_manifest
from diloco_node.daemon.run_record import REPORT_NAME
from diloco_node.errors import ProtocolViolation, StorageError
from diloco_node.lab.chaos.story import RegionSample, RunSample
from diloco_node.lab.demo import demo_report as report_module
from diloco_node.lab.demo.demo_report import (
    build_report,
    check_folder,
    learner_status,
    longest_ledger,
    read_merges,
    read_region_report,
)
from diloco_node.storage.trained import allot_incarnation
from tests.kit.counter_kit import counter_file
from tests.kit.memory_transport import MemoryTransport, Network
from tests.kit.node_kit import MANIFEST
from tests.kit.node_world import SOME_IDENTITY, Region, VirtualLoop

NAMES = ("a", "b", "c")
SETTINGS = RunSettings(
    fragments=2, sync_every=6, steps_max=20, heartbeat_ns=50_000_000, election_timeout_ns=400_000_000
)


def train(folder: Path) -> dict[str, LearnerStatus]:
    """A short run of three regions; what is left is in `folder`."""

    async def main() -> dict[str, LearnerStatus]:
        MemoryTransport.network = Network()
        regions = [Region(name, NAMES, folder / name, SETTINGS, seed) for seed, name in enumerate(NAMES, start=1)]
        for region in regions:
            await region.start()
        async with asyncio.timeout(300):
            while not all(region.has_finished for region in regions):
                assert [region.errors for region in regions] == [[], [], []]
                await asyncio.sleep(0.05)
        statuses = {}
        for region in regions:
            save_manifest(region.folder, MANIFEST)
            write_report(region.folder, region.node.status.document())
            statuses[region.name] = region.node.learner.shown_status
            await region.stop()
        return statuses  # type: ignore[return-value]

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())


@pytest.fixture(scope="module")
def trained() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="dl-"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_module, "GrpcTransport", MemoryTransport)
        patch.setattr(node_module, "load_identity", lambda *_, **__: SOME_IDENTITY)
        statuses = train(folder)
    for name, status in statuses.items():
        assert learner_status(read_region_report(folder / name)["learner"]) == status
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    folder = tmp_path / "run"
    shutil.copytree(trained, folder, ignore=lambda _, names: [name for name in names if name.endswith(".sock")])
    return folder


def edit(run: Path, region: str, change: Callable[[dict[str, Any]], None]) -> None:
    path = run / region / REPORT_NAME
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_a_whole_run_balances(run: Path) -> None:
    report = build_report(run, NAMES, wan={"file": "x"})
    tokens = report["tokens"]
    assert tokens["balanced"] is True
    assert tokens["faults"] == []
    assert tokens["trained"] == tokens["merged"] + tokens["carried"] + tokens["discarded"]
    assert tokens["trained"] == sum(region["tokens"] for region in report["regions"]) > 0
    assert report["equal_digests"] is True
    assert report["rounds_committed"] == sum(report["regions"][0]["versions"]) > 0
    assert [region["name"] for region in report["regions"]] == list(NAMES)
    assert report["wan"] == {"file": "x"}
    assert report["folder"] == str(run.resolve())
    json.dumps(report)


@pytest.mark.parametrize("digest", ["0" * 64, None])
def test_a_region_with_other_bytes_is_seen(run: Path, digest: str | None) -> None:
    edit(run, "b", lambda document: document.update(digest=digest))
    assert build_report(run, NAMES)["equal_digests"] is False


def test_no_digest_anywhere_is_no_proof_of_equality(run: Path) -> None:
    for name in NAMES:
        edit(run, name, lambda document: document.update(digest=None))
    assert build_report(run, NAMES)["equal_digests"] is False


def test_losses_that_nobody_measured_are_none_and_the_worst_one_counts(run: Path) -> None:
    assert build_report(run, NAMES)["val_loss_global"] is None
    edit(run, "a", lambda document: document.update(val_loss_global=2.0))
    edit(run, "b", lambda document: document.update(val_loss_global=2.5))
    assert build_report(run, NAMES)["val_loss_global"] == 2.5


def test_steps_that_no_ledger_knows_are_a_fault(run: Path) -> None:
    """A second life of a learner whose end was never booked."""
    allot_incarnation(run / "c", lambda _: 2)
    counter = sorted((run / "c" / "learner").glob("trained-*"))[-1]
    counter.write_bytes(counter_file(7, 700))
    report = build_report(run, NAMES)
    assert report["tokens"]["balanced"] is False
    assert report["tokens"]["faults"]


def test_a_count_is_missed_but_where_the_ledger_says_that_its_folder_was_lost(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same counter is gone from two regions: one was wiped, of the other nobody knows anything."""
    (counter,) = (run / "c" / "learner").glob("trained-*")
    counter.unlink()
    assert build_report(run, NAMES)["tokens"]["balanced"] is False
    base, entries = longest_ledger([run / name for name in NAMES], 2)
    last = entries[-1]
    lost = seal(last.index + 1, last.term, last.hash, DiskNamedBody("c", b""))
    monkeypatch.setattr(report_module, "longest_ledger", lambda *_: (base, (*entries, lost)))
    tokens = build_report(run, NAMES)["tokens"]
    # Its last report, which is newer than the folder in this made-up run, has nothing to be compared with.
    assert [fault for fault in tokens["faults"] if " says " not in fault] == []
    assert [one["learner"] for one in tokens["uncounted"]] == ["c"]


def test_a_learner_that_counted_less_than_was_merged_is_a_fault(run: Path) -> None:
    (counter,) = (run / "a" / "learner").glob("trained-*")
    counter.write_bytes(counter_file(1, 100))
    assert not check_folder(run, NAMES, {}).balanced


def test_the_longest_ledger_counts_and_the_others_are_part_of_it(run: Path) -> None:
    folders = [run / name for name in NAMES]
    base, entries = longest_ledger(folders, 2)
    assert [entry.index for entry in entries] == list(range(1, len(entries) + 1))
    assert longest_ledger(folders[::-1], 2) == (base, entries)


def test_the_merges_of_a_ledger_that_is_summed_up_are_not_known(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = RunSample(5, {"a": RegionSample(True, True, commit_index=10_000)})
    base, entries = longest_ledger([run / name for name in NAMES], 2)
    merges = read_merges(run, NAMES, [sample])
    assert merges is not None
    assert len(merges) == build_report(run, NAMES)["rounds_committed"]
    monkeypatch.setattr(report_module, "longest_ledger", lambda *_: (replace(base, index=8), entries))
    assert read_merges(run, NAMES, [sample]) is None


def test_ledgers_of_two_runs_are_told_apart(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(run, other)
    path = other / "b" / "ledger.log"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises((StorageError, ProtocolViolation)):
        build_report(other, NAMES)


@pytest.mark.parametrize("damage", ["missing", "half"])
def test_a_region_that_did_not_end_in_order_is_named(run: Path, damage: str) -> None:
    path = run / "b" / REPORT_NAME
    if damage == "missing":
        path.unlink()
    else:
        path.write_text(path.read_text()[:100])
    with pytest.raises(StorageError, match=r"b/report\.json can't be read.*see its logs"):
        build_report(run, NAMES)


def test_a_region_that_never_learnt_its_model_is_named(run: Path) -> None:
    (run / "a" / MANIFEST_NAME).unlink()
    with pytest.raises(StorageError, match=r"never learnt its model; see logs/learner\.log"):
        build_report(run, NAMES)


def test_a_region_without_a_learner_at_its_end_is_still_reported(run: Path) -> None:
    edit(run, "b", lambda document: document.update(learner=None))
    assert build_report(run, NAMES)["regions"][1]["name"] == "b"

"""`replay` comes to the ledger's digests, from a whole archive or from what is left, and says what is missing."""

import fcntl
import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_node.core.types import FinishedBody, Recovered, RoundBody, SnapshotBody
from diloco_node.daemon.final_model import write_final
from diloco_node.main import main
from diloco_node.state_names import FINAL_NAME, LEDGER_NAME
from diloco_node.storage.ledger_files import LEDGER_END_NAME
from diloco_node.storage.ledger_reader import read_whole_ledger
from diloco_node.storage.store import RegionStore
from diloco_node.storage.tensor_files import read_header, write_state
from tests.kit.archived_run import train
from tests.kit.node_kit import MANIFEST


@pytest.fixture(scope="module")
def trained() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="dl-"))
    train(folder)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """The archive, to be damaged."""
    return Path(shutil.copytree(trained / "a", tmp_path / "a", ignore=shutil.ignore_patterns("*.sock")))


def replayed(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    """Exit code, and the document or what is on standard error."""
    code = main(["replay", str(folder), "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else err


def test_an_archive_is_replayed_from_theta_0_to_every_digest(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, entries = read_whole_ledger(trained / "a", 2)
    assert base.index == 0
    assert len(list((trained / "a").glob("ledger-*.log"))) >= 2, "the ledger was summed up several times"
    code, document = replayed(trained / "a", capsys)
    assert code == 0
    assert document["agrees"]
    assert document["final_agrees"] is True
    assert [item["from_version"] for item in document["fragments"]] == [0, 0]
    versions = {(0, 0), (1, 0)}
    versions |= {(entry.body.fragment, entry.body.version) for entry in entries if isinstance(entry.body, SnapshotBody)}
    assert {(item["fragment"], item["version"]) for item in document["digests"]} == versions
    assert len(versions) > 8


def test_without_an_archive_it_begins_at_the_first_state_that_has_all_it_needs(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert RegionStore(trained / "b", is_read_only=True).load(2).base.index > 0, "the ledger was summed up"
    code, document = replayed(trained / "b", capsys)
    assert (code, document["agrees"], document["final_agrees"]) == (0, True, True)
    assert min(item["from_version"] for item in document["fragments"]) > 0
    assert len(document["digests"]) >= 2
    assert main(["replay", str(trained / "b" / LEDGER_NAME)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("2 of 2 fragments begin later than Theta_0, fragment 0 at version ")
    assert "; not here: the state of fragment 0 at version 0\n" in out
    assert "payload_archive = true" in out
    assert "final.safetensors holds the computed parameters" in out


def test_nothing_is_changed_and_nothing_waits_for_the_lock(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / "payloads" / "f000-v00000002-0000000000000000.bin").write_bytes(b"damaged, and of no use")
    (copied / "state" / "being-written.tmp").write_bytes(b"of the daemon")
    before = contents(copied)
    with (copied / "lock").open("r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert replayed(copied, capsys)[0] == 0
        assert main(["ledger", str(copied)]) == 0
    assert contents(copied) == before


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def test_another_theta_0_is_found_at_once_and_at_the_end(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = copied / "state" / "f001-v00000000.bin"
    theta, momentum = RegionStore(copied, is_read_only=True).read_state(1, 0)
    theta[7] = np.nextafter(theta[7], np.float32(9))
    write_state(path, theta, momentum, fragment=1, version=0, digest=read_header(path).digest)
    code, document = replayed(copied, capsys)
    assert (code, document["agrees"], document["final_agrees"]) == (1, False, False)
    wrong = [(item["fragment"], item["version"]) for item in document["digests"] if not item["agrees"]]
    assert wrong[0] == (1, 0)
    assert {fragment for fragment, _ in wrong} == {1}
    assert main(["replay", str(copied)]) == 1
    assert "fragment 1 version 0 differs: ledger " in capsys.readouterr().out


def test_another_final_model_is_found(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_final(copied, {spec.name: np.zeros(spec.shape, np.float32) for spec in MANIFEST.tensors})
    code, document = replayed(copied, capsys)
    assert (code, document["final_agrees"], all(item["agrees"] for item in document["digests"])) == (1, False, True)
    (copied / FINAL_NAME).unlink()
    code, document = replayed(copied, capsys)
    assert (code, document["final_agrees"]) == (0, None)


def test_what_is_missing_is_named_with_what_to_do(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (copied / "state").glob("f000-*"):
        if not path.name.startswith("f000-v00000000"):
            path.unlink()
    (payload,) = (copied / "payloads").glob("f000-v00000004-*")
    payload.unlink()
    code, error = replayed(copied, capsys)
    assert code == 6
    assert "lacks the payload of fragment 0 version 4" in error
    assert "payload_archive = true" in error


def test_a_hole_is_named_and_it_begins_behind_it(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remove_payloads(copied, 0, (4, 5, 6, 8))
    code, document = replayed(copied, capsys)
    assert (code, document["agrees"], document["final_agrees"]) == (0, True, True)
    with_hole, whole = document["fragments"]
    assert with_hole["from_version"] >= 8
    assert with_hole["lack"] == "the payload of fragment 0 version 4"
    assert (whole["from_version"], whole["lack"]) == (0, "")
    for path in (copied / "state").glob("f000-*"):
        if not path.name.startswith("f000-v00000000"):
            path.unlink()
    code, error = replayed(copied, capsys)
    assert code == 6
    assert "lacks the payload of fragment 0 version 4: replay another" in error


def remove_payloads(folder: Path, fragment: int, versions: Iterable[int]) -> None:
    for version in versions:
        (payload,) = (folder / "payloads").glob(f"f{fragment:03d}-v{version:08d}-*")
        payload.unlink()


def last_versions(folder: Path) -> dict[int, int]:
    """Per fragment the last round in the folder's ledger."""
    _, entries = read_whole_ledger(folder, 2)
    return {item.body.fragment: item.body.version for item in entries if isinstance(item.body, RoundBody)}


def unfinish(folder: Path) -> None:
    """Forget the end of the run, as if it went on, and the states after the first one, as if none were written yet."""
    store = RegionStore(folder)
    region_state = store.load(2)
    end = next(item.index for item in region_state.entries if isinstance(item.body, FinishedBody))
    store.persist(region_state.term, region_state.voted_for, end, ())
    store.close()
    for path in (folder / "state").glob("f*"):
        if "v00000000" not in path.name:
            path.unlink()


def test_while_a_run_goes_on_it_stops_at_the_payloads_that_are_here(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = last_versions(copied)
    unfinish(copied)
    remove_payloads(copied, 0, (last[0] - 1,))
    code, document = replayed(copied, capsys)
    assert (code, document["agrees"]) == (0, True)
    assert [item["version"] for item in document["fragments"]] == [last[0] - 2, last[1]]
    assert [item["from_version"] for item in document["fragments"]] == [0, 0]


def test_rounds_that_a_daemon_adds_meanwhile_are_not_looked_for(
    copied: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the run, and the payload of its last round, come while the payloads are listed."""
    ends = [copied / LEDGER_NAME, copied / LEDGER_END_NAME]
    ends += (copied / "payloads").glob(f"f000-v{last_versions(copied)[0]:08d}-*")
    contents = {path: path.read_bytes() for path in ends}
    unfinish(copied)
    ends[-1].unlink()
    real = RegionStore.load

    def load(store: RegionStore, fragments: int) -> Recovered:
        region_state = real(store, fragments)
        for path, data in contents.items():
            path.write_bytes(data)
        return region_state

    monkeypatch.setattr(RegionStore, "load", load)
    code, document = replayed(copied, capsys)
    assert (code, document["agrees"], document["final_agrees"]) == (0, True, None)


def test_a_damaged_payload_is_named_and_stays_where_it_is(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (payload,) = (copied / "payloads").glob("f000-v00000004-*")
    data = bytearray(payload.read_bytes())
    data[-1] ^= 1
    payload.write_bytes(data)
    code, error = replayed(copied, capsys)
    assert code == 6
    assert payload.name in error
    assert payload.exists()


@pytest.mark.parametrize("what", ["manifest", "folder"])
def test_what_is_not_of_this_run_is_refused(copied: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    if what == "manifest":
        (copied / "manifest.json").unlink()
    else:
        copied = copied / "nothing"
    code, error = replayed(copied, capsys)
    assert code == (2 if what == "folder" else 6)
    reasons = {"manifest": "never learnt its model", "folder": "is no folder with ledger.log"}
    assert reasons[what] in error

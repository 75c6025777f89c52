"""The state folder: what was answered survives, what was not is cut off, what is damaged is found."""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from diloco_node.core.ledger.folder_lives import starts_of
from diloco_node.core.types import DISK_ID_BYTES, Entry, LedgerBase, Recovered
from diloco_node.errors import StorageError
from diloco_node.state_names import LEDGER_NAME
from diloco_node.storage import ledger_files
from diloco_node.storage.disk_id import DISK_ID_NAME
from diloco_node.storage.ledger_files import LEDGER_END_NAME, VOTE_NAME
from diloco_node.storage.ledger_reader import read_whole_ledger
from diloco_node.storage.store import RegionStore
from tests.kit.store_kit import FRAGMENTS, base_of, chain, flip, load, refusing

pytestmark = pytest.mark.usefixtures("fast_disk")


# ---- term, vote and log ----------------------------------------------------------------------------------------------


def test_an_empty_folder_is_a_new_region(folder: Path) -> None:
    first = load(folder)
    assert first == Recovered(0, "", (), (-1, -1), frozenset(), (b"", b""), disk=first.disk)
    assert len(first.disk) == DISK_ID_BYTES
    assert load(folder) == first


def test_two_folders_have_two_ids(folder: Path, tmp_path: Path) -> None:
    assert load(folder).disk != load(tmp_path / "other").disk


def test_each_start_is_another_life_of_the_folder_and_two_copies_begin_two(folder: Path, tmp_path: Path) -> None:
    first = load(folder)
    shutil.copytree(folder, tmp_path / "copy")
    lives = [first.life, load(folder).life, load(tmp_path / "copy").life]
    assert [starts_of(life) for life in lives] == [1, 2, 2]
    assert lives[1] != lives[2]
    assert load(tmp_path / "copy").disk == first.disk


def test_a_folder_of_an_older_version_keeps_its_id(folder: Path) -> None:
    before = load(folder)
    body = b"DLDISK1\n" + before.disk
    (folder / DISK_ID_NAME).write_bytes(body + hashlib.sha256(body).digest())
    after = load(folder)
    assert (after.disk, starts_of(after.life)) == (before.disk, 1)


@pytest.mark.parametrize("name", ["x.bin.3.tmp", ".tmpkxyaIU"])
def test_what_a_crash_left_half_written_is_gone(folder: Path, name: str) -> None:
    load(folder)
    (folder / name).write_bytes(b"half of the final model")  # safetensors has names of its own
    load(folder)
    assert not (folder / name).exists()


def test_a_folder_on_a_full_disk_is_loaded_in_its_last_life(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = load(folder)
    monkeypatch.setattr(os, "writev", refusing(errno.ENOSPC))
    after = load(folder)
    assert (after.disk, after.life) == (before.disk, before.life)
    assert not list(folder.rglob("*.tmp"))


def test_what_was_persisted_is_loaded(folder: Path, store: RegionStore) -> None:
    entries = chain(5)
    store.persist(1, "a", 0, entries[:2])
    store.persist(1, "a", 0, entries[2:])
    store.persist(3, "", 0, ())
    store.close()
    recovered = load(folder)
    assert (recovered.term, recovered.voted_for, recovered.entries) == (3, "", entries)


def test_truncation_replaces_the_end_of_the_log(folder: Path, store: RegionStore) -> None:
    entries = chain(5)
    other = chain(2, term=2, after=entries[:3], name="b")
    store.persist(1, "a", 0, entries)
    store.persist(2, "", 4, other[3:])
    store.persist(2, "", 0, chain(1, term=2, after=other)[-1:])
    store.persist(2, "", 6, ())
    store.close()
    assert load(folder).entries == other


def test_the_log_goes_on_after_a_restart(folder: Path, store: RegionStore) -> None:
    entries = chain(6)
    store.persist(1, "", 0, entries[:3])
    store.close()
    again = RegionStore(folder)
    again.load(FRAGMENTS)
    again.persist(1, "", 0, entries[3:])
    again.close()
    assert load(folder).entries == entries


def test_one_small_entry_is_one_write_and_one_fdatasync(store: RegionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = chain(2)
    store.persist(1, "a", 0, entries[:1])
    calls: list[str] = []
    for name in ("pwrite", "writev", "write", "fsync", "fdatasync", "ftruncate", "open", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, real=real, name=name: (calls.append(name), real(*args))[1])
    store.persist(1, "a", 0, entries[1:])
    assert calls == ["pwrite", "fdatasync"]


def test_a_gap_in_the_entries_is_a_bug_of_the_caller(store: RegionStore) -> None:
    entries = chain(3)
    with pytest.raises(AssertionError):
        store.persist(1, "", 0, entries[1:])


# ---- what a crash may leave; tests/storage/test_power_cut.py has each moment -----------------------------------------


def grown(folder: Path) -> tuple[bytes, bytes, tuple[Entry, ...]]:
    """ledger.log before and after one write of two entries, and all entries."""
    store = RegionStore(folder)
    store.load(FRAGMENTS)
    entries = chain(4)
    store.persist(1, "a", 0, entries[:2])
    before, noted = ((folder / name).read_bytes() for name in (LEDGER_NAME, LEDGER_END_NAME))
    store.persist(1, "a", 0, entries[2:])
    after = (folder / LEDGER_NAME).read_bytes()
    store.close()
    # A crash in the middle of a write comes before it is noted as durable.
    (folder / LEDGER_END_NAME).write_bytes(noted)
    return before, after, entries


def test_a_torn_last_write_is_cut_off_wherever_it_ends(folder: Path) -> None:
    before, after, entries = grown(folder)
    for length in range(len(before), len(after)):
        (folder / LEDGER_NAME).write_bytes(after[:length])
        assert load(folder).entries == entries[:2], length
        assert (folder / LEDGER_NAME).read_bytes() == before, length


def test_a_last_write_whose_sectors_never_arrived_is_cut_off(folder: Path) -> None:
    store = RegionStore(folder)
    store.load(FRAGMENTS)
    entries = chain(20)
    store.persist(1, "a", 0, entries[:2])
    before = (folder / LEDGER_NAME).stat().st_size
    noted = (folder / LEDGER_END_NAME).read_bytes()
    store.persist(1, "a", 0, entries[2:])
    store.close()
    (folder / LEDGER_END_NAME).write_bytes(noted)
    whole = (folder / LEDGER_NAME).read_bytes()
    sectors = range(before - before % 512, len(whole), 512)
    assert len(sectors) >= 3
    for sector in sectors:
        first = max(before, sector)
        last = min(sector + 512, len(whole))
        torn = whole[:first] + bytes(last - first) + whole[last:]
        (folder / LEDGER_NAME).write_bytes(torn)
        assert load(folder).entries == entries[:2], sector
    (folder / LEDGER_NAME).write_bytes(whole[:before] + bytes(len(whole) - before))
    assert load(folder).entries == entries[:2]


def test_after_a_cut_the_log_goes_on(folder: Path) -> None:
    _, after, entries = grown(folder)
    (folder / LEDGER_NAME).write_bytes(after[:-1])
    store = RegionStore(folder)
    assert store.load(FRAGMENTS).entries == entries[:2]
    assert store.cut_bytes > 0
    store.persist(1, "a", 0, entries[2:])
    store.close()
    assert load(folder).entries == entries


def test_the_first_start_may_be_interrupted_anywhere(folder: Path) -> None:
    load(folder)
    header = (folder / LEDGER_NAME).read_bytes()
    for content in [*(header[:length] for length in range(len(header))), bytes(len(header)), bytes(3)]:
        (folder / LEDGER_NAME).write_bytes(content)
        assert load(folder).entries == ()
        assert (folder / LEDGER_NAME).read_bytes() == header
    (folder / LEDGER_NAME).unlink()
    assert load(folder).entries == ()
    (folder / LEDGER_NAME).unlink()
    (folder / VOTE_NAME).unlink()
    assert load(folder).term == 0


# ---- damage ----------------------------------------------------------------------------------------------------------


def lost(folder: Path) -> str:
    """What a start on a copy of the folder finds damaged; it begins again under another id, nothing is deleted."""
    copy = folder.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    store = RegionStore(copy)
    recovered = store.load(FRAGMENTS)
    store.close()
    assert recovered.entries == ()
    assert (recovered.term, recovered.voted_for) == (0, "")
    assert recovered.disk not in disk_id(folder), "a folder that lost what it had has another id"
    for name in (LEDGER_NAME, VOTE_NAME):
        if (folder / name).exists():
            assert (copy / f"{name}.damaged-1").read_bytes() == (folder / name).read_bytes()
    again = load(copy)
    assert again == recovered
    return store.lost


def disk_id(folder: Path) -> bytes:
    return (folder / DISK_ID_NAME).read_bytes()


@pytest.mark.parametrize("name", [LEDGER_NAME, VOTE_NAME])
def test_a_flipped_bit_anywhere_in_ledger_and_vote_is_found_and_the_folder_begins_again(
    folder: Path, name: str
) -> None:
    grown(folder)
    # In every eighth byte another bit.
    for bit in range(0, 8 * (folder / name).stat().st_size, 63):
        flip(folder / name, bit)
        assert "is damaged" in lost(folder), bit
        flip(folder / name, bit)
    assert len(load(folder).entries) == 4


def test_a_ledger_that_was_cut_short_at_a_frame_is_found(folder: Path) -> None:
    before, after, entries = grown(folder)
    store = RegionStore(folder)
    assert store.load(FRAGMENTS).entries == entries
    store.persist(1, "a", 0, chain(5)[4:])
    store.close()
    for content in (before, after):
        (folder / LEDGER_NAME).write_bytes(content)
        assert "frames were durable" in lost(folder)
    (folder / LEDGER_END_NAME).write_bytes(b"torn")
    assert load(folder).entries == entries, "without the note it looks like a write that was interrupted"


def test_a_folder_whose_id_is_gone_or_damaged_keeps_its_ledger_under_another_id(folder: Path) -> None:
    _, _, entries = grown(folder)
    for content in (None, b"", b"x" * 56):
        before = load(folder)
        if content is None:
            (folder / DISK_ID_NAME).unlink()
        else:
            (folder / DISK_ID_NAME).write_bytes(content)
        after = load(folder)
        assert after.entries == before.entries == entries
        assert after.disk != before.disk
        kept = [path.read_bytes() for path in folder.glob(f"{DISK_ID_NAME}.damaged-*")]
        assert content is None or content in kept, "set aside, not written over"


def test_a_frame_that_is_missing_doubled_or_swapped_is_found(folder: Path) -> None:
    store = RegionStore(folder)
    store.load(FRAGMENTS)
    ends = [(folder / LEDGER_NAME).stat().st_size]
    for entry in chain(3):
        store.persist(1, "", 0, (entry,))
        ends.append((folder / LEDGER_NAME).stat().st_size)
    store.close()
    data = (folder / LEDGER_NAME).read_bytes()
    head, one, two, three = data[: ends[0]], *(data[a:b] for a, b in pairwise(ends))
    for wrong in (head + two + three, head + one + three, head + one + one + two, head + two + one, one + two):
        (folder / LEDGER_NAME).write_bytes(wrong)
        assert "is damaged at byte" in lost(folder)


def test_zeros_in_the_middle_are_damage_and_not_a_torn_write(folder: Path) -> None:
    store = RegionStore(folder)
    store.load(FRAGMENTS)
    entries = chain(42)
    store.persist(1, "", 0, entries[:40])
    store.persist(1, "", 0, entries[40:])
    store.close()
    data = (folder / LEDGER_NAME).read_bytes()
    (folder / LEDGER_NAME).write_bytes(data[:1024] + bytes(512) + data[1536:])
    assert "does not match its checksum" in lost(folder)


def test_a_lost_sector_before_a_later_write_is_damage_and_not_a_torn_write(folder: Path) -> None:
    """The disk said that it had written the frame, and it has one that was written after it."""
    before, _, _ = grown(folder)
    store = RegionStore(folder)
    store.load(FRAGMENTS)
    for entry in chain(12)[4:]:
        store.persist(1, "a", 0, (entry,))
    store.close()
    data = (folder / LEDGER_NAME).read_bytes()
    first = len(before)
    stop = first - first % 512 + 512
    assert data.count(b"DLf1", stop) >= 2
    (folder / LEDGER_NAME).write_bytes(data[:first] + bytes(stop - first) + data[stop:])
    assert "is damaged at byte" in lost(folder)


def test_a_missing_vote_or_ledger_is_found(folder: Path) -> None:
    grown(folder)
    for name in (VOTE_NAME, LEDGER_NAME):
        data = (folder / name).read_bytes()
        (folder / name).unlink()
        assert "is missing" in lost(folder)
        (folder / name).write_bytes(b"")
        assert "is damaged" in lost(folder)
        (folder / name).write_bytes(data)
    assert len(load(folder).entries) == 4


def test_an_older_copy_of_the_vote_is_found(folder: Path, store: RegionStore) -> None:
    old = (folder / VOTE_NAME).read_bytes()
    store.persist(1, "a", 0, chain(1))
    store.close()
    (folder / VOTE_NAME).write_bytes(old)
    assert "older copy" in lost(folder)


def test_entries_that_do_not_follow_each_other_are_refused(folder: Path, store: RegionStore) -> None:
    other = chain(2, name="b")
    store.persist(1, "", 0, chain(1))
    store.persist(1, "", 0, other[1:])
    store.close()
    assert "entry 2 of the ledger does not follow entry 1" in lost(folder)


# ---- two daemons on one folder ---------------------------------------------------------------------------------------


def test_a_second_daemon_in_this_process_is_found(folder: Path, store: RegionStore) -> None:
    with pytest.raises(StorageError, match=rf"in use by another daemon \(process {os.getpid()}\)"):
        RegionStore(folder)
    store.close()
    RegionStore(folder).close()


def test_the_lock_goes_with_the_process_however_it_ends(folder: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from diloco_node.storage.store import RegionStore;"
        "RegionStore(Path(sys.argv[1])).load(1); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(StorageError, match=f"process {other.pid}"):
            RegionStore(folder)
        other.kill()
        other.wait()
    RegionStore(folder).close()


# ---- a ledger that begins with a base --------------------------------------------------------------------------------


def test_a_ledger_that_is_summed_up_goes_on(folder: Path, store: RegionStore) -> None:
    entries = chain(9)
    store.persist(1, "a", 0, entries[:6])
    size = (folder / LEDGER_NAME).stat().st_size
    store.persist(1, "a", 0, entries[6:8], base_of(entries[4], b"sums"))
    assert (folder / LEDGER_NAME).stat().st_size < size
    store.persist(1, "a", 8, entries[7:])
    store.close()
    recovered = load(folder)
    assert (recovered.base, recovered.entries) == (base_of(entries[4], b"sums"), entries[5:])


def test_a_base_of_the_leader_takes_the_place_of_the_whole_ledger(folder: Path, store: RegionStore) -> None:
    entries = chain(40)
    store.persist(1, "a", 0, chain(5, name="other"))
    store.persist(1, "a", 1, (), base_of(entries[29]))
    assert load_again(store, folder) == (base_of(entries[29]), ())
    again = RegionStore(folder)
    again.load(FRAGMENTS)
    again.persist(1, "a", 0, entries[30:33], base_of(entries[30]))
    again.persist(1, "a", 32, ())
    assert load_again(again, folder) == (base_of(entries[30]), ())


def load_again(store: RegionStore, folder: Path) -> tuple[LedgerBase, tuple[Entry, ...]]:
    store.close()
    recovered = load(folder)
    return recovered.base, recovered.entries


@pytest.mark.parametrize("is_archive", [False, True])
def test_a_refused_sum_is_written_when_the_disk_takes_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_archive: bool
) -> None:
    store = RegionStore(folder, is_archive=is_archive)
    store.load(FRAGMENTS)
    entries = chain(9)
    store.persist(1, "a", 0, entries[:7])
    for name in ("writev", "fsync"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refusing(errno.ENOSPC))
            with pytest.raises(StorageError, match="full"):
                store.persist(1, "a", 0, entries[7:], base_of(entries[3]))
    store.persist(1, "a", 0, entries[7:], base_of(entries[3]))
    assert load_again(store, folder) == (base_of(entries[3]), entries[4:])
    assert read_whole_ledger(folder, FRAGMENTS)[1] == (entries if is_archive else entries[4:])


def test_a_torn_write_behind_a_base_is_cut_off_and_damage_before_it_is_refused(
    folder: Path, store: RegionStore
) -> None:
    entries = chain(9)
    store.persist(1, "a", 0, entries[:7])
    store.persist(1, "a", 0, (), base_of(entries[3]))
    whole, noted = ((folder / name).read_bytes() for name in (LEDGER_NAME, LEDGER_END_NAME))
    store.persist(1, "a", 0, entries[7:])
    data = (folder / LEDGER_NAME).read_bytes()
    store.close()
    (folder / LEDGER_END_NAME).write_bytes(noted)
    (folder / LEDGER_NAME).write_bytes(data[: len(whole) + 40])
    assert load(folder).entries == entries[4:7]
    for at in (40, 1000, len(whole) - 30):
        (folder / LEDGER_NAME).write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        assert "damaged" in lost(folder)


def test_an_older_vote_than_the_base_is_refused(folder: Path, store: RegionStore) -> None:
    entries = chain(3, term=4)
    store.persist(4, "a", 0, entries)
    store.persist(4, "a", 0, (), base_of(entries[2]))
    store.close()
    vote = ledger_files.VoteFile(folder)
    vote.write(3, "")
    assert "older copy" in lost(folder)

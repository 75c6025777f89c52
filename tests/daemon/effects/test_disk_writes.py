"""Writes that are tried again while the disk refuses."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from diloco_node.core.events import Note
from diloco_node.daemon.effects import disk_writes
from diloco_node.daemon.effects.disk_writes import REFUSALS_SHOWN, DiskWrites
from diloco_node.errors import StorageError

WRITES = 70


async def test_a_full_disk_is_one_alarm_and_one_line_however_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A region that holds for a minute has a payload of each fragment to write."""
    monkeypatch.setattr(disk_writes, "STORAGE_RETRY_S", 0.01)
    notes: list[Note] = []
    writes, is_full = DiskWrites(notes.append), True

    def write() -> str:
        if is_full:
            raise StorageError("the disk is full")
        return "written"

    assert writes.summary() == ""
    with ThreadPoolExecutor(1) as executor:
        tasks = [
            asyncio.create_task(writes.until_written(f"payload {number}", executor, write)) for number in range(WRITES)
        ]
        for _ in range(3_000):
            if len(writes.refusals) == WRITES:
                break
            await asyncio.sleep(0.01)
        text = writes.summary()
        is_full = False
        assert await asyncio.gather(*tasks) == ["written"] * WRITES
    assert text.startswith("payload 0: the disk is full; payload 1: the disk is full; ")
    assert text.endswith(f"; and {WRITES - REFUSALS_SHOWN} more files")
    first = [note for note in notes if "payload 0 not written, trying again: the disk is full" in note.text]
    assert first[0].is_alarm
    assert not any(note.is_alarm for note in notes if "payload 1 not written" in note.text)
    assert writes.summary() == ""


async def test_each_disk_and_each_reason_has_an_alarm_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a payload on a full disk hides that the ledger's disk fails."""
    monkeypatch.setattr(disk_writes, "STORAGE_RETRY_S", 0.01)
    notes: list[Note] = []
    writes = DiskWrites(notes.append)
    refusals = {f"payload-{number}": [(1, 28)] * 9 for number in range(REFUSALS_SHOWN)}
    refusals |= {"ledger": [(1, 5)] * 5, "copy": [(1, 28), (2, 28)]}
    summaries = []

    def write(subject: str) -> None:
        summaries.append(writes.summary())
        if refusals[subject]:
            error = StorageError("the disk refuses")
            error.disk = refusals[subject].pop(0)
            raise error

    with ThreadPoolExecutor(1) as executor:
        await asyncio.gather(*(writes.until_written(name, executor, partial(write, name)) for name in refusals))
    alarms = [note.text.partition(" ")[0] for note in notes if note.is_alarm]
    assert alarms == ["payload-0", "ledger", "copy"], "the copy's when another disk refuses it"
    assert sum("not written" in note.text for note in notes) == REFUSALS_SHOWN + 3
    assert any(text.startswith("payload-0: the disk refuses; ledger: the disk refuses; ") for text in summaries)
    assert (writes.summary(), writes.refusals) == ("", {})

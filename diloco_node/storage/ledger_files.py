"""The two files of the ledger: `vote.bin` (term and vote) and `ledger.log` (entries).

`ledger.log` is appended to. After a header of 16 bytes it consists of frames, one for each write::

    magic "DLf1" | u32 number | u32 body bytes | u32 CRC-32 of the body | u32 CRC-32 of these 16 bytes | body | 0xff

The body is msgpack: [truncate_from, [encoded entry, ...]]; a truncation is a record like any other, so no
acknowledged byte is ever changed, and one small write is one `pwrite` and one `fdatasync`.

Only when the first entries are summed up a new file takes the place of the old one: its first frame is [-1, [index,
term, hash, summary]] (the base), the next ones hold all entries that are left.

A crash may leave these, and opening deals with each: no file, an empty one or half a header (begun anew, if there was
no vote yet); a last frame that ends early, or in which whole sectors are zero because they never reached the disk (cut
off: nothing of it was acknowledged). A whole frame has no such sector: its first and last byte are not zero, and no
encoded entry has 512 zeros. All else that does not fit is damage and is refused: a node that has forgotten what it
acknowledged, or a vote, must not take part in another.

Bytes that are read back may be in the kernel's cache only: the process before died between write and fdatasync, or that
failed, after which the kernel takes the lost pages for clean. So opening writes the last frame once more, and after a
failed fdatasync the log is copied to a new file.

`ledger.end` tells a file that was cut short at some frame from a shorter ledger: how many frames were durable. It is
written without fsync, so it may be older than the log, never newer. A damaged one says nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgpack

from diloco_node import atomic_file
from diloco_node.atomic_file import sync_folder, write_at
from diloco_node.core.ledger.entries import decode_chain, encode_entry
from diloco_node.core.types import NO_BASE, Entry, LedgerBase
from diloco_node.core.unpacking import unpack
from diloco_node.errors import LedgerLost, PeerError, StorageError, SupersededError
from diloco_node.state_names import LEDGER_NAME
from diloco_node.storage.durable import disk_error, disk_errors, replace_file

VOTE_NAME: Final = "vote.bin"
LEDGER_END_NAME: Final = "ledger.end"
FRAME_BYTES_MAX: Final = 256 << 20
"""Longest body of a frame: above what a follower may have staged."""

_VOTE_MAGIC: Final = b"DLVOTE1\n"
_LOG_MAGIC: Final = b"DLLEDGER"
LEDGER_VERSION: Final = 3
"""Another one for each change of the fields of entries (`core.ledger.entries`)."""

_FRAME: Final = struct.Struct("<4sIII")
_CRC: Final = struct.Struct("<I")
_FRAMES: Final = struct.Struct("<QI")
_FRAME_MAGIC: Final = b"DLf1"
_FRAME_END: Final = b"\xff"
_FRAME_HEAD_BYTES: Final = _FRAME.size + _CRC.size
_SECTOR_BYTES: Final = 512
_BASE_MARK: Final = -1
_BATCH_BYTES: Final = 64 << 20
"""Entries in one frame of a new file; they are read back whole."""

_REMEDY: Final = "Don't start this region from a copy of an older state: others count on what it has acknowledged"


class VoteFile:
    """Term and vote, replaced as a whole. term, voted_for: as on disk; 0 and "" before the first vote."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / VOTE_NAME
        self.term, self.voted_for = 0, ""

    @property
    def exists(self) -> bool:
        """Whether the file is there, whatever is in it."""
        return self._path.exists()

    def open(self, *, is_new: bool) -> None:
        """Read it, or begin it if the folder is new. Raises StorageError: damaged, or gone where the ledger is not."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError as error:
            if not is_new:
                raise StorageError(f"{self._path} is missing, the ledger beside it is not. {_REMEDY}") from error
            self.write(0, "")
            return
        except OSError as error:
            raise disk_error("read", self._path, error) from error
        body, digest = data[:-32], data[-32:]
        if not body.startswith(_VOTE_MAGIC) or hashlib.sha256(body).digest() != digest:
            raise StorageError(f"{self._path} is damaged: its hash does not match. {_REMEDY}")
        try:
            self.term, self.voted_for = unpack(body[len(_VOTE_MAGIC) :], depth_max=1, values_max=3, items_max=2)
        except (PeerError, ValueError, TypeError) as error:
            raise StorageError(f"{self._path} is damaged: {error}. {_REMEDY}") from error

    def write(self, term: int, voted_for: str) -> None:
        """Replace it; durable when this returns. Raises StorageError."""
        body = _VOTE_MAGIC + msgpack.packb([term, voted_for])
        replace_file(self._path, [body, hashlib.sha256(body).digest()])
        self.term, self.voted_for = term, voted_for


class LedgerFile:
    """The entries on disk: `open` once, then `append`.

    Attributes:
        base: what the file begins with. last_index: of the last entry on disk.
        cut_bytes: what `open` cut off at the end: a write that a crash interrupted.
    """

    def __init__(self, folder: Path, name: str = LEDGER_NAME) -> None:
        self._path = folder / name
        self._end_path = self._path.with_suffix(".end")  # ledger.end; an earlier ledger that is kept has none
        self._descriptor = -1
        self._end = 0
        self._frames = 0
        self._last_frame = 0
        self._is_suspect = False
        self.base = NO_BASE
        self.last_index = 0
        self.cut_bytes = 0

    @property
    def exists(self) -> bool:
        """Whether the file is there, whatever is in it."""
        return self._path.exists()

    def open(self, *, is_new: bool) -> tuple[Entry, ...]:
        """Read all entries, cut off a torn last write, and be ready to append.

        is_new: nothing was ever written, so the file may be missing or half begun. A file that is there has a durable
        name (`RegionStore.load` syncs the folder first).

        Raises StorageError: damaged or missing (says where), or the disk refuses.
        """
        if not is_new and not self.exists:
            raise StorageError(f"{self._path} is missing, the vote beside it is not. {_REMEDY}")
        with disk_errors("open", self._path):
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            data = self._path.read_bytes()
            if is_new and len(data) <= len(_LOG_HEADER) and data in (_LOG_HEADER[: len(data)], bytes(len(data))):
                self._begin()
                return ()
            self._check_header(data)
            bodies = self._read_frames(data)
            self._check_count(self._durable_frames())
            if self._end < len(data):
                self.cut_bytes = len(data) - self._end
                os.ftruncate(self._descriptor, self._end)
            # Earlier frames were on the disk before the last one was begun.
            write_at(self._descriptor, self._last_frame, data[self._last_frame : self._end])
            os.fsync(self._descriptor)
        entries = self.decode(bodies, previous_index=self.base.index, previous_hash=self.base.hash)
        self.last_index = self.base.index + len(entries)
        return entries

    def read(self) -> list[bytes]:
        """All entries, encoded, without changing anything; `base` is then what they follow, its hash unchecked.

        A torn end is passed over: a daemon may be writing it. Raises StorageError.
        """
        with disk_errors("read", self._path), self._path.open("rb") as file:
            durable = self._durable_frames()  # before the data: a daemon may append meanwhile
            data = file.read()
            # Else the daemon has begun a new file meanwhile, and the number may be that file's.
            is_current = os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        self._check_header(data)
        bodies = self._read_frames(data)
        if is_current:
            self._check_count(durable)
        return bodies

    def decode(self, bodies: Sequence[bytes], *, previous_index: int, previous_hash: bytes) -> tuple[Entry, ...]:
        """The entries that follow that one, their hash chain checked. Raises StorageError."""
        try:
            return decode_chain(bodies, previous_index=previous_index, previous_hash=previous_hash)
        except PeerError as error:
            raise StorageError(f"{self._path} is damaged: {error}. {_REMEDY}") from error

    def append(self, truncate_from: int, entries: Sequence[Entry]) -> None:
        """Write one frame; durable when this returns. truncate_from: forget the entries from here on first; 0: none.

        Raises StorageError: the disk refused; try again. After a failed fdatasync nobody knows what of this file is on
        disk, so the next try begins by copying the log to a new one. LedgerLost: what was durable can't be read back
        for that copy: no further try would help.
        """
        if self._is_suspect:
            self._move_to_new_file()
        last_index = truncate_from - 1 if truncate_from else self.last_index
        assert self.base.index <= last_index <= self.last_index, (truncate_from, self.last_index)
        assert [entry.index for entry in entries] == list(range(last_index + 1, last_index + 1 + len(entries)))
        frame = _frame(self._frames, [truncate_from, [encode_entry(entry) for entry in entries]])
        try:
            self._write_at_end(frame)
        except OSError as error:
            self._undo()
            raise disk_error("append to", self._path, error) from error
        self._last_frame = self._end
        self._end += len(frame)
        self._frames += 1
        self.last_index = last_index + len(entries)
        self._note_durable_frames()

    def _durable_frames(self) -> int:
        """How many frames were durable once, as far as is known."""
        try:
            data = self._end_path.read_bytes()
        except OSError:
            return 0
        if len(data) != _FRAMES.size or _FRAMES.unpack(data)[1] != zlib.crc32(data[: -_CRC.size]):
            return 0
        return int(_FRAMES.unpack(data)[0])

    def _check_count(self, durable: int) -> None:
        """Check that all frames that were durable once have been read. Raises StorageError."""
        if self._frames < durable:
            raise self._damage(self._end, f"{durable} frames were durable, {self._frames} are there")

    def _note_durable_frames(self) -> None:
        number = struct.pack("<Q", self._frames)
        with contextlib.suppress(OSError):  # what it says is of use, not needed
            self._end_path.write_bytes(number + _CRC.pack(zlib.crc32(number)))

    def begin_with(
        self, base: LedgerBase, truncate_from: int, entries: Sequence[Entry], *, kept_as: Path | None = None
    ) -> None:
        """Write a new file that begins with this; it is the log, durably, when this returns.

        base: entries up to its index are forgotten. truncate_from, entries: as for `append`, in the same moment.
        kept_as: the old file stays, under this name, or with a number behind it. Raises: as `append`; the old file is
        still there then.
        """
        try:
            _, bodies = self._checked_data()
            stop = truncate_from - 1 - self.base.index if truncate_from else None
            remaining = bodies[max(0, base.index - self.base.index) : stop]
            frames = [_frame(0, [_BASE_MARK, [base.index, base.term, base.hash, base.summary]])]
            remaining += [encode_entry(entry) for entry in entries]
            frames += [_frame(1 + number, [0, batch]) for number, batch in enumerate(_batches(remaining))]
            if kept_as is not None:
                self._keep(kept_as)
            # The new file has fewer frames, and must not look as if it had lost some.
            self._end_path.unlink(missing_ok=True)
            sync_folder(self._path.parent)
            self._replace([_LOG_HEADER, *frames])
        except OSError as error:
            self._is_suspect = True  # the name may stand for the new file already
            raise disk_error("sum up", self._path, error) from error
        self._frames = len(frames)
        self._end = len(_LOG_HEADER) + sum(len(frame) for frame in frames)
        self._last_frame = self._end - len(frames[-1])
        self.base = base
        self.last_index = base.index + len(remaining)
        self._note_durable_frames()

    def _keep(self, kept_as: Path) -> None:
        """Give the file that is open one more name; never that of another file. Raises OSError."""
        name, number = kept_as, 0
        while name.exists():
            if os.path.samestat(name.stat(), os.fstat(self._descriptor)):
                return  # of a try before, which may have got as far as the new file
            number += 1
            name = kept_as.with_stem(f"{kept_as.stem}-{number}")
        os.link(self._path, name)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write_at_end(self, frame: bytes) -> None:
        write_at(self._descriptor, self._end, frame)
        try:
            os.fdatasync(self._descriptor)
        except OSError:
            self._is_suspect = True
            raise

    def _undo(self) -> None:
        """Cut off the half-written frame, so that the next one follows the last good one."""
        try:
            os.ftruncate(self._descriptor, self._end)
        except OSError:
            self._is_suspect = True

    def _move_to_new_file(self) -> None:
        """Copy the frames that were durable to a new file that takes the place of this one. Raises as `append`."""
        with disk_errors("copy", self._path):
            self._replace([self._checked_data()[0]])

    def _replace(self, chunks: Sequence[bytes]) -> None:
        """Write a new file of these parts, which takes the place of this one. Raises OSError."""
        atomic_file.replace_file(self._path, chunks, is_durable=True)
        descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._is_suspect = False

    def _checked_data(self) -> tuple[bytes, list[bytes]]:
        """Read back what was written; all of it, and its entries, encoded. Raises OSError; LedgerLost: other bytes, or
        fewer, are there."""
        data = _read_range(self._descriptor, self._end)
        copy = LedgerFile(self._path.parent)
        try:
            entries = copy._read_frames(data) if data[: len(_LOG_HEADER)] == _LOG_HEADER else []
        except StorageError as error:
            raise LedgerLost(f"what was on the disk can't be read back: {error}") from error
        last_index = copy.base.index + len(entries)
        if (copy._end, copy._frames, last_index) != (self._end, self._frames, self.last_index):
            raise LedgerLost(
                f"{self._path} has {last_index} whole entries of {self.last_index} that were "
                f"on the disk: look at dmesg, replace the disk. {_REMEDY}"
            )
        return data, entries

    def _begin(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, _LOG_HEADER, 0)
        os.fsync(self._descriptor)
        sync_folder(self._path.parent)
        self._end = len(_LOG_HEADER)

    def _read_frames(self, data: bytes) -> list[bytes]:
        """All entries, encoded; `base` is then what they follow, `_end` where the last whole frame ends."""
        entries: list[bytes] = []
        self._end = len(_LOG_HEADER)
        while self._end < len(data):
            body_bytes = self._frame_body_bytes(data, self._end)
            if body_bytes is None:
                break
            start = self._end + _FRAME_HEAD_BYTES
            self._read_body(data[start : start + body_bytes], entries)
            self._last_frame = self._end
            self._end = start + body_bytes + len(_FRAME_END)
            self._frames += 1
        return entries

    def _frame_body_bytes(self, data: bytes, at: int) -> int | None:
        """Length of the body of the frame that begins there; None if that frame is torn."""
        head = data[at : at + _FRAME_HEAD_BYTES]
        if len(head) < _FRAME_HEAD_BYTES:
            return None
        magic, number, body_bytes, body_crc = _FRAME.unpack_from(head)
        if _CRC.unpack_from(head, _FRAME.size)[0] != zlib.crc32(head[: _FRAME.size]):
            if _has_empty_sector(data, at, len(data)) and not _has_frame(data, at + 1, self._frames + 1):
                return None
            raise self._damage(at, f"the head of frame {self._frames} does not match its checksum")
        if magic != _FRAME_MAGIC or number != self._frames or body_bytes > FRAME_BYTES_MAX:
            raise self._damage(at, f"found frame {number} of {body_bytes} bytes, expected frame {self._frames}")
        start = at + _FRAME_HEAD_BYTES
        end = start + body_bytes + len(_FRAME_END)
        if end > len(data):
            return None
        body = data[start : start + body_bytes]
        if zlib.crc32(body) != body_crc or data[end - 1 : end] != _FRAME_END:
            if end == len(data) and _has_empty_sector(data, at, end):
                return None
            raise self._damage(start, f"frame {number} of {body_bytes} bytes does not match its checksum")
        return int(body_bytes)

    def _read_body(self, body: bytes, entries: list[bytes]) -> None:
        try:
            truncate_from, bodies = unpack(body, depth_max=2, values_max=len(body), items_max=len(body))
            if truncate_from == _BASE_MARK and self._frames == 0:
                self.base = LedgerBase(*bodies)
                return
            if truncate_from:
                if truncate_from <= self.base.index:
                    raise ValueError(f"it forgets entry {truncate_from}, which is summed up")
                del entries[truncate_from - 1 - self.base.index :]
            entries += bodies
        except (PeerError, ValueError, TypeError) as error:
            raise self._damage(self._end, f"frame {self._frames}: {error}") from error

    def _check_header(self, data: bytes) -> None:
        """Tell damage from a whole ledger of another version. Raises StorageError, SupersededError."""
        head = data[: len(_LOG_HEADER)]
        if head == _LOG_HEADER:
            return
        version = head[len(_LOG_MAGIC)] if len(head) == len(_LOG_HEADER) else 0
        if head == _log_header(version):
            raise SupersededError(
                f"{self._path} is of ledger version {version}, and this diloco-node reads version {LEDGER_VERSION}: "
                "nothing was changed. Install the version that wrote it, in all regions, and end the run with it; "
                "run.init takes its final model into a new run"
            )
        raise self._damage(0, "its header is not that of a ledger")

    def _damage(self, at: int, fault: str) -> StorageError:
        return StorageError(f"{self._path} is damaged at byte {at}: {fault}. {_REMEDY}")


def _log_header(version: int) -> bytes:
    """The first 16 bytes of a ledger. version: from 1 to 255."""
    return _LOG_MAGIC + struct.pack("<II", version, zlib.crc32(_LOG_MAGIC + bytes([version])))


_LOG_HEADER: Final = _log_header(LEDGER_VERSION)


def _frame(number: int, content: list[object]) -> bytes:
    body = msgpack.packb(content)
    assert len(body) <= FRAME_BYTES_MAX, len(body)
    head = _FRAME.pack(_FRAME_MAGIC, number, len(body), zlib.crc32(body))
    return bytes(head + _CRC.pack(zlib.crc32(head)) + body + _FRAME_END)


def _batches(bodies: Sequence[bytes]) -> list[list[bytes]]:
    """The entries in order, cut into what one frame may hold; no batch for no entry."""
    batches: list[list[bytes]] = []
    batch_bytes = _BATCH_BYTES
    for body in bodies:
        if batch_bytes + len(body) > _BATCH_BYTES:
            batches.append([])
            batch_bytes = 0
        batches[-1].append(body)
        batch_bytes += len(body)
    return batches


def _read_range(descriptor: int, stop: int) -> bytes:
    """The first `stop` bytes, fewer where the file is shorter. Raises OSError."""
    chunks, at = [], 0
    while at < stop and (chunk := os.pread(descriptor, stop - at, at)):
        chunks.append(chunk)
        at += len(chunk)
    return b"".join(chunks)


def _has_frame(data: bytes, start: int, number_min: int) -> bool:
    """Whether the head of a frame with this number or a higher one is there: no frame before it is torn then."""
    at = data.find(_FRAME_MAGIC, start)
    while at >= 0:
        head = data[at : at + _FRAME_HEAD_BYTES]
        if len(head) == _FRAME_HEAD_BYTES and _CRC.unpack_from(head, _FRAME.size)[0] == zlib.crc32(head[: _FRAME.size]):
            _, number, _, _ = _FRAME.unpack_from(head)
            if number >= number_min:
                return True
        at = data.find(_FRAME_MAGIC, at + 1)
    return False


def _has_empty_sector(data: bytes, start: int, end: int) -> bool:
    """Whether all bytes of some sector of the disk, as far as it lies in [start, end), are zero."""
    first = start - start % _SECTOR_BYTES
    for sector in range(first, end, _SECTOR_BYTES):
        if not any(data[max(start, sector) : min(end, sector + _SECTOR_BYTES)]):
            return True
    return False

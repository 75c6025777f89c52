"""`disk.id`: the random id of a state folder, by which the ledger knows whether it is still the one that it was.

The id is written last, when vote and ledger are there, and taken away first, before one of them is: a folder with an id
has all that it ever acknowledged. A folder that lost any of it gets another id, and the ledger counts it again only
when it has caught up (`core.ledger.disks`). Behind the id is the number of starts, which a daemon counts up before it
says a word: so an older copy of a folder is found out (`core.ledger.folder_lives`).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

from diloco_node.atomic_file import sync_folder
from diloco_node.core.ledger.folder_lives import LIFE_BITS, next_life
from diloco_node.core.types import DISK_ID_BYTES
from diloco_node.errors import DiskRefused
from diloco_node.storage.durable import disk_error, disk_errors, replace_file

DISK_ID_NAME: Final = "disk.id"
_MAGIC: Final = b"DLDISK1\n"
_LIFE_BYTES: Final = 8


class DiskIdFile:
    """The file in one folder.

    Attributes:
        value: the id; empty before `begin` if there is none, or a damaged one. life: of the folder (`FolderLife`).
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / DISK_ID_NAME
        self.value, self.life = b"", 0

    def read(self) -> None:
        """Read it. Raises StorageError: the disk refuses."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise disk_error("read", self._path, error) from error
        body, digest = data[:-32], data[-32:]
        value, life = body[len(_MAGIC) :][:DISK_ID_BYTES], body[len(_MAGIC) + DISK_ID_BYTES :]
        # Folders of older versions have no life.
        is_whole = body.startswith(_MAGIC) and len(value) == DISK_ID_BYTES and len(life) in (0, _LIFE_BYTES)
        if is_whole and hashlib.sha256(body).digest() == digest:
            self.value, self.life = value, int.from_bytes(life, "big")

    def begin(self) -> None:
        """Begin the folder's next life; one without an id gets another, and a damaged one is set aside.

        Durable when this returns. On a disk that refuses it an older life goes on.

        Raises StorageError: the disk refuses a first id.
        """
        if not self.value:
            self.retire()
        value = self.value or os.urandom(DISK_ID_BYTES)
        life = next_life(self.life, int.from_bytes(os.urandom(LIFE_BITS // 8), "big"))
        body = _MAGIC + value + life.to_bytes(_LIFE_BYTES, "big")
        try:
            replace_file(self._path, [body, hashlib.sha256(body).digest()])
        except DiskRefused:
            if not self.value:
                raise
            return
        self.value, self.life = value, life

    def retire(self) -> None:
        """Take the id away for good; durable when this returns. Raises StorageError."""
        with disk_errors("set aside", self._path):
            set_aside(self._path)
        self.value, self.life = b"", 0


def set_aside(path: Path) -> str:
    """Rename a damaged file, durably, never over another; the new name, empty if there is none. Raises OSError."""
    if not path.exists():
        return ""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(aside)
    sync_folder(path.parent)
    return aside.name

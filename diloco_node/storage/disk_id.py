"""`disk.id`: the random id of a state folder, by which the ledger knows whether it is still the one that it was.

The id is written last, when vote and ledger are there, and taken away first, before one of them is: a folder with an id
has all that it ever acknowledged. One that lost any of it gets another id, and the ledger counts it again only when it
has caught up (`core.ledger.disks`).
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Final

from diloco_node.atomic_file import sync_folder
from diloco_node.core.types import DISK_ID_BYTES
from diloco_node.storage.durable import disk_error, replace_file

DISK_ID_NAME: Final = "disk.id"
_MAGIC: Final = b"DLDISK1\n"


class DiskIdFile:
    """The file in one folder.

    Attributes:
        value: the id; empty before `make` if there is none, or a damaged one.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / DISK_ID_NAME
        self.value = b""

    def read(self) -> None:
        """Read it. Raises StorageError: the disk refuses."""
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise disk_error("read", self._path, error) from error
        body, digest = data[:-32], data[-32:]
        is_whole = len(body) == len(_MAGIC) + DISK_ID_BYTES and body.startswith(_MAGIC)
        if is_whole and hashlib.sha256(body).digest() == digest:
            self.value = body[len(_MAGIC) :]

    def make(self) -> None:
        """Give the folder another id; a damaged one is set aside. Durable when this returns. Raises StorageError."""
        self.retire()
        value = os.urandom(DISK_ID_BYTES)
        body = _MAGIC + value
        replace_file(self._path, [body, hashlib.sha256(body).digest()])
        self.value = value

    def retire(self) -> None:
        """Take the id away for good; durable when this returns. Raises StorageError."""
        try:
            set_aside(self._path)
        except OSError as error:
            raise disk_error("set aside", self._path, error) from error
        self.value = b""


def set_aside(path: Path) -> str:
    """Rename a damaged file, never over another one, and make that durable.

    Returns:
        The new name; empty if the file is not there.

    Raises:
        OSError: the disk refuses.
    """
    if not path.exists():
        return ""
    number = 1
    while (aside := path.with_name(f"{path.name}.damaged-{number}")).exists():
        number += 1
    path.rename(aside)
    sync_folder(path.parent)
    return aside.name

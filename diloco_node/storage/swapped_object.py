"""One object of a bucket that is written by compare-and-swap: only if it is still what was read.

S3 compares the ETag (If-Match, If-None-Match), Azure too, and Google Cloud the generation. A store that ignores these
conditions would lose writes without a word. So each process tries them (`check`) before it relies on them.
"""

from __future__ import annotations

import secrets
from datetime import datetime
from typing import TYPE_CHECKING, Final, NamedTuple

from diloco_node.errors import StoreRefused
from diloco_node.storage.durable import DamagedFile
from diloco_node.storage.object_store import BucketObjects

if TYPE_CHECKING:
    from obstore import UpdateVersion
    from obstore.store import ClientConfig, RetryConfig

FOLDER: Final = "witness"
"""Everything of a witness is below this name in its bucket."""

RECORD: Final = f"{FOLDER}/record"

BEFORE: Final = f"{FOLDER}/before"
"""The record that `members recover` has closed."""

CLIENT: Final[ClientConfig] = {"connect_timeout": "3s", "timeout": "10s", "allow_http": True}
RETRIES: Final[RetryConfig] = {"max_retries": 0}
"""None: the core asks again. And a write that was sent twice could be refused for the first one's sake."""


class TaggedObject(NamedTuple):
    """The content of an object, the mark of this version, and when it was written, by the store's clock."""

    data: bytes
    tag: UpdateVersion
    written: datetime


class SwappedObject(BucketObjects):
    """Objects of a bucket, asked with short patience; arguments and errors as `BucketObjects`."""

    client, retries = CLIENT, RETRIES

    def read_tagged(self, key: str, bytes_max: int) -> TaggedObject | None:
        """Read an object; None: it is not there."""
        import obstore

        try:
            with self.errors("read", key):
                answer = obstore.get(self.store, key)
                meta = answer.meta
                if meta["size"] > bytes_max:
                    raise StoreRefused(f"{self.place}/{key} has {meta['size']} bytes, at most {bytes_max} belong there")
                return TaggedObject(bytes(answer.bytes()), _tag(meta["e_tag"], meta["version"]), meta["last_modified"])
        except DamagedFile:
            return None

    def swap(self, key: str, data: bytes, tag: UpdateVersion | None) -> bool:
        """Write an object if it is still the one with this tag (None: if there is none). Returns whether it was."""
        import obstore
        from obstore.exceptions import AlreadyExistsError, NotFoundError, PreconditionError

        with self.errors("write", key):
            try:
                obstore.put(self.store, key, data, mode="create" if tag is None else tag, use_multipart=False)
            except (AlreadyExistsError, PreconditionError, NotFoundError, FileNotFoundError) as error:
                if "NoSuchBucket" in str(error):
                    raise StoreRefused(f"can't write {self.place}/{key}: there is no such bucket: make it") from error
                return False
        return True

    def written(self, folder: str) -> dict[str, datetime]:
        """When each object below a folder was written, or begun, by its key."""
        import obstore

        with self.errors("list", folder):
            chunks = obstore.list(self.store, folder)
            return {meta["path"]: meta["last_modified"] for chunk in chunks for meta in chunk}

    def check(self, folder: str) -> None:
        """Try the conditions on an object of its own below a folder. Raises StoreRefused: they don't hold."""
        key = f"{folder}/probe-{secrets.token_hex(8)}"
        is_made = self.swap(key, b"1", None)
        try:
            first = self.read_tagged(key, 1)
            if not is_made or first is None or self.swap(key, b"2", None) or not self.swap(key, b"3", first.tag):
                self._refuse("If-None-Match")
            elif self.swap(key, b"4", first.tag):
                self._refuse("If-Match")
        finally:
            self.remove(key)

    def _refuse(self, condition: str) -> None:
        raise StoreRefused(
            f"{self.place} does not keep to {condition} when an object is written, so it can't be a witness: take "
            "another store, or a newer version of it"
        )


def _tag(e_tag: str | None, version: str | None) -> UpdateVersion:
    """The marks of a version that a store compares: it has one of them, or both."""
    tag: UpdateVersion = {}
    if e_tag is not None:
        tag["e_tag"] = e_tag
    if version is not None:
        tag["version"] = version
    return tag

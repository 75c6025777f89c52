"""Objects below a URL (S3, Google Cloud, Azure) by obstore, or files below a folder: written whole or not at all.

obstore sends large objects in several parts side by side, and an object has its name only when the last part is there.
It is imported where a URL is opened: the extra `store` installs it.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

import numpy as np

from diloco_node.atomic_file import TMP_SUFFIX
from diloco_node.config.urls import is_url
from diloco_node.errors import ConfigError, StoreRefused
from diloco_node.escaping import escaped
from diloco_node.numeric import U8
from diloco_node.storage.durable import DamagedFile, disk_error, disk_errors, make_folder, replace_file

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

CREDENTIALS: Final = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (aws configure export-credentials --format env), or the "
    "machine's role; AWS_ENDPOINT_URL and AWS_REGION for others than Amazon",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or the machine's account",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or the machine's identity",
}
"""Settings that each kind of store reads from the environment. Its keys are the schemes that are known."""

FILE_SCHEME: Final = "file"
CHUNK_BYTES: Final = 8 << 20
"""A part of a large object: of at most 10,000 in S3, so an object has 80 GB at most."""

PARTS_AT_ONCE: Final = 4
"""The parts of an object that are on their way."""

CLIENT: Final[ClientConfig] = {"connect_timeout": "10s", "timeout": "10m", "allow_http": True}
"""A part may take long on a link that a run uses, too. http is used only where the endpoint's URL says so."""

RETRIES: Final[RetryConfig] = {"max_retries": 6, "retry_timeout": timedelta(minutes=3)}
ERROR_CHARACTERS: Final = 300


Pace = Callable[[int], None]
"""Takes a number of bytes, and returns when they may go. Called in the thread of the request."""


def _at_once(_: int) -> None:
    pass


def folder_of(place: str | Path) -> Path | None:
    """The folder that a path or a file:// URL names; None: the URL is another one."""
    if not is_url(place):
        return Path(place)
    address = urlsplit(str(place))
    is_folder = address.scheme == FILE_SCHEME and address.path and not address.netloc
    return Path(unquote(address.path)) if is_folder else None


def open_objects(place: str | Path) -> Objects:
    """Open a URL or a folder; nobody is asked. Raises ConfigError: no store that is known, or obstore is missing."""
    if (folder := folder_of(place)) is not None:
        return FolderObjects(folder)
    url = str(place)
    return BucketObjects(url, bucket_scheme(url))


def bucket_scheme(url: str) -> str:
    """The scheme of a bucket's URL, a key of CREDENTIALS. Raises ConfigError, as `open_objects`."""
    address = urlsplit(url)
    if folder_of(url) is not None:  # a copy goes there without a scheme; whoever asks for one wants to compare and swap
        raise ConfigError(f"{url} is a folder, which can't be a witness: give s3://BUCKET/PREFIX, gs:// or az://")
    if "@" in address.netloc or address.query:
        keys = CREDENTIALS.get(address.scheme, "the variables of that store")
        raise ConfigError(
            f"{address.scheme}://: secrets in a URL would stand in messages: leave them out, and set {keys}"
        )
    if address.scheme not in CREDENTIALS or not address.netloc or not url.startswith(f"{address.scheme}://"):
        raise ConfigError(f"{url} names no store: give s3://BUCKET/PREFIX, gs://, az:// or file:///FOLDER")
    if importlib.util.find_spec("obstore") is None:
        raise ConfigError(f"{url} needs obstore: pip install 'diloco-node[store]'")
    return address.scheme


class FolderObjects:
    """Files below `place`, by keys as "v00000120/f000.bin". All methods raise StorageError."""

    def __init__(self, folder: Path) -> None:
        self.place = str(folder)
        self._folder = folder

    def sizes(self) -> dict[str, int]:
        """Bytes of each object, by its key. A folder that is not there holds nothing."""
        with disk_errors("read", self._folder):
            paths = (path for path in self._folder.glob("*/*") if path.suffix != TMP_SUFFIX and path.is_file())
            return {path.relative_to(self._folder).as_posix(): path.stat().st_size for path in paths}

    def read(self, key: str, bytes_max: int) -> U8:
        """Read an object, owned by the caller. Raises DamagedFile: it is not there, or larger than that."""
        path = self._folder / key
        try:
            if path.stat().st_size > bytes_max:
                raise DamagedFile(f"{path} has {path.stat().st_size} bytes, at most {bytes_max} belong there")
            return np.fromfile(path, np.uint8)
        except FileNotFoundError as error:
            raise DamagedFile(f"{path} is not there") from error
        except OSError as error:
            raise disk_error("read", path, error) from error

    def write(self, key: str, chunks: Sequence[bytes | memoryview]) -> None:
        """Write or replace an object; it is durable when this returns."""
        path = self._folder / key
        with disk_errors("write", path):
            make_folder(path.parent)
        replace_file(path, chunks)

    def remove(self, key: str) -> None:
        """Remove an object that is there."""
        with disk_errors("remove", self._folder / key):
            (self._folder / key).unlink()


class BucketObjects:
    """Objects of a store that has a URL, as `FolderObjects`. All methods raise StoreRefused. scheme: of CREDENTIALS."""

    client, retries = CLIENT, RETRIES  # of each request

    def __init__(self, url: str, scheme: str) -> None:
        from obstore.exceptions import BaseError
        from obstore.store import from_url

        self.place = url.rstrip("/")
        self._scheme = scheme
        try:
            self.store: ObjectStore = from_url(url, client_options=self.client, retry_config=self.retries)
        except (BaseError, ValueError) as error:
            raise ConfigError(f"{url}: {_line(error)}; its settings are {CREDENTIALS[scheme]}") from error

    def sizes(self) -> dict[str, int]:
        """Bytes of each object, by its key."""
        import obstore

        with self.errors("list", ""):
            return {meta["path"]: meta["size"] for chunk in obstore.list(self.store) for meta in chunk}

    def read(self, key: str, bytes_max: int, *, pace: Pace = _at_once) -> U8:
        """As `FolderObjects.read`. `pace`: called before so many bytes are asked for."""
        import obstore

        with self.errors("read", key):
            size_bytes = obstore.head(self.store, key)["size"]
            if size_bytes > bytes_max:
                raise DamagedFile(f"{self.place}/{key} has {size_bytes} bytes, at most {bytes_max} belong there")
            content = np.empty(size_bytes, np.uint8)
            # In ranges, for a time limit is that of a whole answer.
            for start in range(0, size_bytes, CHUNK_BYTES):
                stop = min(start + CHUNK_BYTES, size_bytes)
                pace(stop - start)
                chunk = obstore.get_range(self.store, key, start=start, end=stop)
                content[start:stop] = np.frombuffer(memoryview(chunk), np.uint8)
        return content

    def write(self, key: str, chunks: Sequence[bytes | memoryview], *, pace: Pace = _at_once) -> None:
        """As `FolderObjects.write`. `pace`: called before so many bytes are handed to the store."""
        import obstore

        views = [memoryview(chunk).cast("B") for chunk in chunks]

        def paced() -> Iterator[memoryview]:
            for view in views:
                for start in range(0, len(view), CHUNK_BYTES):
                    piece = view[start : start + CHUNK_BYTES]
                    pace(len(piece))
                    yield piece

        is_large = sum(map(len, views)) > CHUNK_BYTES
        with self.errors("write", key):
            obstore.put(
                self.store, key, paced(), use_multipart=is_large, chunk_size=CHUNK_BYTES, max_concurrency=PARTS_AT_ONCE
            )

    def remove(self, key: str) -> None:
        """Remove an object that is there."""
        import obstore

        with self.errors("remove", key):
            obstore.delete(self.store, key)

    @contextmanager
    def errors(self, verb: str, key: str) -> Iterator[None]:
        """Raise what obstore raises in a block as `StoreRefused` or `DamagedFile`: the thing, the cause, the remedy."""
        from obstore.exceptions import BaseError, NotFoundError

        subject = f"can't {verb} {self.place}{'/' if key else ''}{key}"
        try:
            yield
        except (BaseError, FileNotFoundError) as error:
            # obstore's own for a key, and a bucket, that is not there; Python's, of a local file, have its name.
            is_missing = isinstance(error, FileNotFoundError) and error.filename is None
            if not is_missing and not isinstance(error, BaseError):
                raise
            if (is_missing or isinstance(error, NotFoundError)) and "NoSuchBucket" not in str(error):
                raise DamagedFile(f"{subject}: it is not there") from error
            raise StoreRefused(f"{subject}: {_remedy(_words(error), self._scheme)} ({_line(error)})") from error


Objects = FolderObjects | BucketObjects


def _remedy(text: str, scheme: str) -> str:
    """Cause and remedy, by the words that stores and obstore have for them."""
    for pattern, remedy in (
        ("nosuchbucket|bucket does not exist", "there is no such bucket: make it, or correct the URL"),
        (
            r"169\.254|metadata\.google|latest/(api|meta-data)|no credentials|missing.*(key|account)",
            f"no credentials: the environment gives {CREDENTIALS[scheme]}",
        ),
        (
            "accessdenied|forbidden|unauthorized|invalidaccesskey|signaturedoesnotmatch|expiredtoken",
            f"the store refuses these credentials: look at the bucket's policy and at {CREDENTIALS[scheme]}",
        ),
        ("quota|insufficient|storage.?full", "the bucket is full: free some space or raise its quota"),
        ("slowdown|too many requests|service unavailable", "the store is busy: try again later"),
        ("error sending request|connect|dns|timed? ?out", "nobody answers: look at the network and the endpoint"),
    ):
        if re.search(pattern, text, re.IGNORECASE | re.DOTALL):
            return remedy
    return "the store refuses"


def _line(error: BaseException) -> str:
    """A library's error in a line; it may hold words of whatever answers at the URL."""
    return escaped(_words(error)[:ERROR_CHARACTERS] or type(error).__name__)


def _words(error: BaseException) -> str:
    """An error of obstore without its dump of structures."""
    return " ".join(str(error).partition("Debug source:")[0].split())

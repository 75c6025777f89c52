"""A disk whose power may go at any moment: what a piece of code, run unchanged, may leave behind.

`RecordedDisk` looks at the files below a folder at each call that changes or syncs them. So it sees what any library
writes, too. From that it knows what is durable and what is in the kernel's memory only, at each moment. `crash_states`
makes the folders that a power cut may leave there:

- Of what was written to a file since its last sync, any pages of 4 KiB, in any order, are there or not.
- The file's size may have changed without its bytes, which are zero then. Of a file that was never synced nothing need
  be there.
- Of what changed in a folder since its own last sync (new names, renames, removals), any part is there or not.

That is more than a journalling file system does, and what POSIX promises.
"""

import ast
import hashlib
import io
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest

import diloco_node

PAGE_BYTES = 4096
PACKAGE = Path(diloco_node.__file__).parent
SYNC_CALLS = ("fsync", "fdatasync")
SYNCS = (*SYNC_CALLS, "sync_file", "sync_folder")
CHANGING_CALLS = ("pwrite", "writev", "write", "ftruncate", "posix_fallocate", "open")
NAMING_CALLS = ("rename", "replace", "unlink", "link", "mkdir", "rmdir")

Tree = dict[str, Any]
"""A folder: bytes of a file, or another Tree, by name."""


class Killed(BaseException):
    """The process is dead: it does nothing more to the disk. The kernel is alive."""


class Site(NamedTuple):
    """A call in the product that makes something durable."""

    module: str
    function: str
    line: int
    end_line: int

    def __str__(self) -> str:
        return f"{self.module}:{self.function}:{self.line}"


@cache
def sync_sites() -> tuple[Site, ...]:
    """All calls of fsync, fdatasync, `sync_file` and `sync_folder` in the package."""
    found: list[Site] = []

    def visit(node: ast.AST, module: str, function: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = child.name if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) else function
            if isinstance(child, ast.Call):
                called = ast.unparse(child.func).rsplit(".", maxsplit=1)[-1]
                if called in SYNCS:
                    found.append(Site(module, name, child.lineno, child.end_lineno or child.lineno))
            visit(child, module, name)

    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if any(name in text for name in SYNCS):
            visit(ast.parse(text), str(path.relative_to(PACKAGE)), "")
    return tuple(found)


def _calling_sites() -> set[Site]:
    """The sync sites on the stack."""
    lines = set()
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(str(PACKAGE)):
            lines.add((str(Path(path).relative_to(PACKAGE)), frame.f_lineno))
        frame = frame.f_back  # type: ignore[assignment]
    return {one for one in sync_sites() for module, line in lines if module == one.module and _covers(one, line)}


def _covers(site: Site, line: int) -> bool:
    return site.line <= line <= site.end_line


Change = tuple[tuple[str, int], ...]
"""(name, inode or 0 for none) of the names that one call changed."""


@dataclass(frozen=True, slots=True)
class FolderPast:
    """What a folder durably has, and the changes since, in order."""

    durable: dict[str, int]
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """One moment.

    Attributes:
        files: per inode its durable content, then each content since.
        note: what the code had promised by then, as the scenario put it.
        where: the call before.
    """

    root: int
    folders: dict[int, FolderPast]
    files: dict[int, tuple[bytes, ...]]
    note: Any
    where: str

    def trees(self, rng: random.Random, samples: int) -> Iterator[Tree]:
        """The extremes, each single change lost or alone, each file torn in different ways, and some at random."""
        changes = [(inode, at) for inode, past in self.folders.items() for at in range(len(past.changes))]
        dirty = [inode for inode, contents in self.files.items() if len(contents) > 1]
        newest, oldest = ({inode: self.files[inode][at] for inode in dirty} for at in (-1, 0))
        every = set(changes)
        subsets: list[set[tuple[int, int]]] = [set(), every]
        subsets += [{one} for one in changes] + [every - {one} for one in changes]
        for subset in subsets:
            for contents in (newest, oldest):
                yield self._tree(subset, contents)
        for inode in dirty:
            for content in _torn(self.files[inode], rng):
                for subset, rest in ((every, newest), (every, oldest), (set(), newest)):
                    yield self._tree(subset, {**rest, inode: content})
        for _ in range(samples if changes or dirty else 0):
            subset = {one for one in changes if rng.random() < 0.5}
            torn = {inode: rng.choice(list(_torn(self.files[inode], rng))) for inode in dirty}
            yield self._tree(subset, torn)

    def _tree(self, subset: set[tuple[int, int]], contents: dict[int, bytes]) -> Tree:
        return self._folder(self.root, subset, contents)

    def _folder(self, inode: int, subset: set[tuple[int, int]], contents: dict[int, bytes]) -> Tree:
        past = self.folders[inode]
        names = dict(past.durable)
        for at, change in enumerate(past.changes):
            if (inode, at) in subset:
                names.update(change)
        tree: Tree = {}
        for name, child in names.items():
            if child in self.folders:
                tree[name] = self._folder(child, subset, contents)
            elif child:
                tree[name] = contents.get(child, self.files[child][0])
        return tree


def _torn(contents: Sequence[bytes], rng: random.Random) -> Iterator[bytes]:
    """What a file may hold that had these contents since its last sync, the durable one first."""
    yield from contents
    old, new = contents[0], contents[-1]
    pages = range(0, max(map(len, contents)), PAGE_BYTES)

    def mixed(choose: Callable[[int], bytes], size: int) -> bytes:
        found = b"".join(choose(page)[page : page + PAGE_BYTES].ljust(PAGE_BYTES, b"\0") for page in pages)
        return found[:size].ljust(size, b"\0")

    yield mixed(lambda _: old, len(new))
    for one in pages:
        yield mixed(lambda page, one=one: new if page == one else old, len(new))  # type: ignore[misc]
        yield mixed(lambda page, one=one: old if page == one else new, len(new))  # type: ignore[misc]
        if min(len(old), len(new)) <= one <= max(len(old), len(new)):
            yield mixed(lambda _: new, one)
    for _ in range(2):
        picks = {page: rng.choice(contents) for page in pages}
        yield mixed(picks.__getitem__, len(rng.choice(contents)))


@dataclass
class RecordedDisk:
    """Records what happens below `root` while it is entered.

    Args:
        without: this sync does nothing.
        kill_at: the process dies at this call that changes or syncs something, counted from 0; -1: it does not.

    Attributes:
        points: one per moment at which something was different from the one before.
        sites: the sync sites that were called. sync_calls: which of the counted calls they were.
    """

    root: Path
    without: Site | None = None
    kill_at: int = -1
    points: list[CrashPoint] = field(default_factory=list)
    sites: set[Site] = field(default_factory=set)
    sync_calls: list[int] = field(default_factory=list)
    calls: int = 0
    _folders: dict[int, FolderPast] = field(default_factory=dict)
    _names: dict[int, dict[str, int]] = field(default_factory=dict)
    _files: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    _pins: dict[int, int] = field(default_factory=dict)
    _open: set[int] = field(default_factory=set)
    _note: Any = None
    _is_looking: bool = False

    def __enter__(self) -> Self:
        self._patch = pytest.MonkeyPatch()
        self._real = {name: getattr(os, name) for name in (*SYNC_CALLS, *CHANGING_CALLS, *NAMING_CALLS, "close")}
        self._io_open = io.open
        self._root = self.root.stat().st_ino
        self._look("the beginning")
        self.settle()
        for name in SYNC_CALLS:
            self._patch.setattr(os, name, self._sync)
        for name in (*CHANGING_CALLS, *NAMING_CALLS):
            self._patch.setattr(os, name, self._changing(name))
        self._patch.setattr(os, "close", self._close)
        self._patch.setattr(io, "open", self._open_file)
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        self.kill()
        for descriptor in self._pins.values():
            os.close(descriptor)

    @property
    def note(self) -> Any:
        """What has been promised; whatever the scenario makes of it. Setting it is a moment of its own."""
        return self._note

    @note.setter
    def note(self, note: Any) -> None:
        self._note = note
        self._look("a promise")

    def settle(self) -> None:
        """All that was written is durable, as after a long time."""
        self._look("")
        self._files = {inode: contents[-1:] for inode, contents in self._files.items()}
        self._folders = {inode: FolderPast(dict(names)) for inode, names in self._names.items()}
        self._add_point("a long time")

    def settle_file(self, path: Path) -> None:
        """As `settle`, of one file only."""
        self._look("")
        inode = path.stat().st_ino
        self._files[inode] = self._files[inode][-1:]

    def kill(self) -> None:
        """The process ends without another word; another one may follow."""
        for descriptor in self._open:
            self._real["close"](descriptor)
        self._open.clear()
        self.kill_at = -1

    # What the code calls.

    def _count(self) -> None:
        if 0 <= self.kill_at <= self.calls:
            raise Killed
        self.calls += 1

    def _changing(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_looking:
                return real(*args, **kwargs)
            if name == "open" and not args[1] & (os.O_CREAT | os.O_TRUNC):
                descriptor = real(*args, **kwargs)
                self._open.add(descriptor)
                return descriptor
            self._count()
            self._look(f"before {name}")
            result = real(*args, **kwargs)
            if name == "open":
                self._open.add(result)
            self._look(name)
            return result

        return call

    def _open_file(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if self._is_looking or ("r" in mode and "+" not in mode):
            return self._io_open(file, mode, *args, **kwargs)
        self._count()
        self._look("before open")
        opened = self._io_open(file, mode, *args, **kwargs)
        self._look("open")
        return opened

    def _close(self, descriptor: int) -> None:
        self._open.discard(descriptor)
        self._real["close"](descriptor)

    def _sync(self, descriptor: int) -> None:
        self.sync_calls.append(self.calls)
        self._count()
        self._look("before a sync")
        sites = _calling_sites()
        self.sites |= sites
        if self.without in sites:
            return
        inode = os.fstat(descriptor).st_ino
        if inode in self._files:
            self._files[inode] = self._files[inode][-1:]
        elif inode in self._folders:
            self._folders[inode] = FolderPast(dict(self._names[inode]))
        self._add_point("a sync")

    # What it sees.

    def _look(self, where: str) -> None:
        self._is_looking = True
        try:
            self._look_at(str(self.root), self._root)
        finally:
            self._is_looking = False
        self._add_point(where)

    def _look_at(self, folder: str, inode: int) -> None:
        found: dict[str, int] = {}
        folders: list[tuple[str, int]] = []
        with os.scandir(folder) as entries:
            for entry in sorted(entries, key=lambda one: one.name):
                child = entry.inode()
                if entry.is_dir(follow_symlinks=False):
                    folders.append((entry.path, child))
                elif entry.is_file(follow_symlinks=False):
                    self._read(entry.path, child)
                else:
                    continue
                found[entry.name] = child
                self._pin(entry.path, child)
        before = self._names.get(inode, {})
        if found != before or inode not in self._folders:
            past = self._folders.get(inode, FolderPast({}))
            self._folders[inode] = FolderPast(past.durable, (*past.changes, *_changes(before, found)))
            self._names[inode] = found
        for path, child in folders:
            self._look_at(path, child)

    def _read(self, path: str, inode: int) -> None:
        with self._io_open(path, "rb") as file:
            content = file.read()
        contents = self._files.get(inode, (b"",))
        self._files[inode] = contents if contents[-1] == content else (*contents, content)

    def _pin(self, path: str, inode: int) -> None:
        """The number of a removed file must not be given to another one."""
        if inode not in self._pins:
            self._pins[inode] = self._real["open"](path, os.O_PATH | os.O_NOFOLLOW)

    def _add_point(self, where: str) -> None:
        point = CrashPoint(self._root, dict(self._folders), dict(self._files), self._note, where)
        last = self.points[-1] if self.points else None
        if last is None or (last.folders, last.files, last.note) != (point.folders, point.files, point.note):
            self.points.append(point)


def _changes(before: dict[str, int], after: dict[str, int]) -> Iterator[Change]:
    """What was done to the names, a rename as one change."""
    gone = {name: inode for name, inode in before.items() if name not in after}
    for name, inode in after.items():
        if before.get(name) == inode:
            continue
        was = next((one for one, other in gone.items() if other == inode), None)
        if was is None:
            yield ((name, inode),)
        else:
            del gone[was]
            yield ((was, 0), (name, inode))
    for name in gone:
        yield ((name, 0),)


def crash_states(points: Sequence[CrashPoint], *, seed: int, samples: int) -> Iterator[tuple[CrashPoint, Tree]]:
    """All different ones of these moments.

    Args:
        samples: at random at each moment, beside those that are always tried.
    """
    rng = random.Random(seed)
    seen: set[tuple[bytes, int]] = set()
    for point in points:
        for tree in point.trees(rng, samples):
            key = (_fingerprint(tree), id(point.note))
            if key not in seen:
                seen.add(key)
                yield point, tree


def _fingerprint(tree: Tree) -> bytes:
    digest = hashlib.sha256()
    for name, content in sorted(tree.items()):
        inner = _fingerprint(content) if isinstance(content, dict) else hashlib.sha256(content).digest()
        digest.update(f"{name}\0{isinstance(content, dict)}\0".encode() + inner)
    return digest.digest()


def lay_out(tree: Tree, folder: Path) -> None:
    """Write it into an empty folder."""
    for name, content in tree.items():
        if isinstance(content, dict):
            (folder / name).mkdir()
            lay_out(content, folder / name)
        else:
            (folder / name).write_bytes(content)


def outline(tree: Tree, indent: str = "") -> str:
    """Names and sizes, for the message of a failed test."""
    lines = []
    for name, content in sorted(tree.items()):
        is_folder = isinstance(content, dict)
        lines.append(f"{indent}{name}{'/' if is_folder else f' {len(content)} B'}")
        lines += [outline(content, indent + "  ")] if is_folder and content else []
    return "\n".join(lines)

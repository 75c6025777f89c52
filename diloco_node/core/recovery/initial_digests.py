"""Theta_0 on this region's disk, by digests: of each fragment, and whether all of it is of one region."""

from __future__ import annotations


class InitialDigests:
    """Per fragment the digest of the Theta_0 on disk, whether genesis names it or another.

    It is fetched fragment by fragment. Where that ends half-way, the disk has a model that nobody trained.

    named: of the genesis that was fetched for last, or lies in the ledger; empty: there was none.
    """

    def __init__(self, fragments: int) -> None:
        self.named: tuple[bytes, ...] = ()
        self._own: tuple[bytes, ...] = ()
        self._fragments = fragments
        self._on_disk: dict[int, bytes] = {}
        # Fetched in this life of the daemon: the own learner's is not written over them.
        self._fetched: set[int] = set()

    def begin_own(self, digests: tuple[bytes, ...]) -> None:
        """The own learner's is on disk, but for what was fetched; `put` takes each fragment."""
        self._own = digests

    def put(self, fragment: int, digest: bytes, *, is_fetched: bool = False) -> None:
        """Take what is on disk now; an own one does not replace a fetched one."""
        if is_fetched:
            self._fetched.add(fragment)
        if is_fetched or fragment not in self._fetched:
            self._on_disk[fragment] = digest

    def drop(self, fragment: int) -> None:
        """It is wrong, and set aside."""
        self._on_disk.pop(fragment, None)

    def forget(self) -> None:
        """The own learner lays all of it down again, over what was fetched too."""
        self._on_disk.clear()
        self._fetched.clear()

    def get(self, fragment: int) -> bytes | None:
        """Return the digest of a fragment; None if there is none."""
        return self._on_disk.get(fragment)

    @property
    def whole(self) -> tuple[bytes, ...] | None:
        """All digests, if they are of one region."""
        digests = self._all()
        return digests if digests and digests in (self._own, self.named) else None

    @property
    def is_mixed(self) -> bool:
        """Every fragment is there, and they are not of one region."""
        return len(self._all()) == self._fragments and self.whole is None

    def _all(self) -> tuple[bytes, ...]:
        return tuple(digest for _, digest in sorted(self._on_disk.items()))

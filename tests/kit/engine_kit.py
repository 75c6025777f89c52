"""A Docker engine for one test, in namespaces of its own, with the image of the Dockerfile in it.

Processes, mounts, network devices, iptables rules and settings such as ip_forward belong to namespaces that end with
the test's process, however that ends: nothing of them can be left on the machine, and neither another engine nor taken
addresses or ports are in the way. Files lie in a folder that is removed, or by the next run when this one was killed.
Kept in the cache folder are the base image, made by debootstrap, and the wheels.
"""

import contextlib
import fcntl
import functools
import hashlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.kit.repository import ROOT
from tests.kit.waiting import until

CACHE = Path("/var/cache/diloco-node")
BASE = "python:3.11-slim-bookworm"
PACKAGES = "python3.11,python3-venv,python3-pip,ca-certificates,iproute2"
TOOLS = ("dockerd", "docker", "debootstrap", "iptables", "ip", "unshare", "setpriv")
ATTEMPTS = 3
FREE_BYTES_MIN = 6 * 2**30
KEPT_S = 7 * 86_400
SKIPPED = 77
"""The exit code for what this machine can't do."""

NAMESPACES = (
    *("setpriv", "--pdeathsig", "KILL"),
    *("unshare", "--mount", "--net", "--pid", "--ipc", "--uts", "--fork", "--kill-child", "--mount-proc"),
)
"""Before a command: all that it starts and sets up ends with it, and it ends with the process that waits for it."""

FEATURES = """
try() { "$@" > /dev/null 2>"$0/said" || { echo "$* failed: $(head -n 1 "$0/said")"; exit 1; }; }
try ip link set lo up
try ip link add b0 type bridge
try ip link add v0 type veth peer name v1
try ip link set v0 master b0
try iptables -t nat -A POSTROUTING -j MASQUERADE
try iptables -A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -m addrtype ! --dst-type LOCAL -j ACCEPT
try sysctl -qw net.ipv4.ip_forward=1
mkdir "$0/lower" "$0/upper" "$0/work" "$0/merged"
try mount -t overlay overlay -o "lowerdir=$0/lower,upperdir=$0/upper,workdir=$0/work" "$0/merged"
try mount -t tmpfs tmpfs "$0/lower"
"""
"""What an engine needs of the kernel, tried; `$0` is a folder."""


class Skipped(Exception):
    """This machine can't do it; the text says why."""


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")
    sys.stderr.flush()


def missing() -> str:
    """Which program or right is missing for an engine here; "" when none is."""
    if os.geteuid() != 0:
        return "it needs root"
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"{', '.join(lacking)} is missing: .ci/system installs it"
    return ""


@functools.cache
def compose_commands() -> dict[str, list[str]]:
    """Every Compose there is, by "v2" (docker's plug-in, or a command) and "1.29"; what each is called."""
    found: dict[str, list[str]] = {}
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) is not None:
            done = subprocess.run([*command, "version", "--short"], check=False, capture_output=True, text=True)
            if done.returncode == 0:
                found.setdefault("1.29" if done.stdout.strip().startswith("1.") else "v2", command)
    return found


def sh(*words: str, check: bool = True, timeout: float = 900, **more: Any) -> str:
    """What a command printed. It fails with all that it said."""
    done = subprocess.run(words, check=False, text=True, capture_output=True, timeout=timeout, **more)
    if check and done.returncode != 0:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return done.stdout


def await_that(what: str, condition: Callable[[], bool], seconds: float) -> float:
    """How long it took; what does not come true in time fails."""
    try:
        took_s = until(condition, what, within_s=seconds, every_s=0.25)
    except AssertionError as error:
        raise SystemExit(str(error)) from None
    if took_s > 1.0:
        say(f"{what}: after {took_s:.1f} s")
    return took_s


def run_isolated(program: Sequence[str], cache: Path = CACHE) -> int:
    """Run `PROGRAM FOLDER BASE WHEELS` in namespaces of its own; its exit code.

    Raises:
        Skipped: the machine can't.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    why = missing()
    if why:
        raise Skipped(why)
    cache.mkdir(parents=True, exist_ok=True)
    with work_folder(cache) as folder:
        free = shutil.disk_usage(folder).free
        if free < FREE_BYTES_MIN:
            raise Skipped(f"{cache} has {free >> 20} MiB free; {FREE_BYTES_MIN >> 20} MiB are needed")
        check_kernel(folder)
        base, wheels = make_base(cache), make_wheels(cache)
        make_compose_v2(cache)
        forget_old(cache)
        come_first(folder.name)
        words = [*NAMESPACES, *program, str(folder), str(base), str(wheels)]
        try:
            with subprocess.Popen(words, cwd=ROOT) as running:
                try:
                    return running.wait()
                finally:
                    running.kill()
        finally:
            remove_cgroups(folder.name)


@contextlib.contextmanager
def work_folder(cache: Path) -> Iterator[Path]:
    """A new folder, removed in the end, as are those whose process is gone."""
    for old in cache.glob("engine-*"):
        with contextlib.suppress(OSError), locked(old / "lock", fcntl.LOCK_EX | fcntl.LOCK_NB):
            say(f"{old} was left by a run that was killed")
            remove_cgroups(old.name)
            shutil.rmtree(old, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix="engine-", dir=cache))
    try:
        with locked(folder / "lock", fcntl.LOCK_EX):
            yield folder
    finally:
        until_gone(lambda: shutil.rmtree(folder, ignore_errors=True), [folder])


@contextlib.contextmanager
def locked(file: Path, how: int) -> Iterator[None]:
    """Held by this process, and given up when it ends in whatever way."""
    with file.open("a") as opened:
        fcntl.flock(opened, how)
        yield


def check_kernel(folder: Path) -> None:
    """Raises Skipped with the first part that is not there."""
    tried = folder / "kernel"
    tried.mkdir()
    done = subprocess.run(
        [*NAMESPACES, "sh", "-c", FEATURES, str(tried)], check=False, text=True, capture_output=True, timeout=600
    )
    if done.returncode != 0:
        raise Skipped(f"this machine can't run a container engine: {(done.stdout + done.stderr).strip()}")


def pause(seconds: float) -> None:
    """Before the registry is asked again."""
    time.sleep(seconds)


def attempt(what: str, *words: str, timeout: float) -> None:
    """A command that needs the network: some tries, then Skipped with what the last one said."""
    said = ""
    for number in range(1, ATTEMPTS + 1):
        say(f"{what}{f', attempt {number}' if number > 1 else ''}")
        try:
            done = subprocess.run(words, check=False, text=True, capture_output=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            said = f"it did not end within {timeout:.0f} s"
            continue
        if done.returncode == 0:
            return
        said = (done.stdout + done.stderr)[-1000:]
        pause(5.0 * number)
    raise Skipped(f"{what}: failed {ATTEMPTS} times, the registry can't be reached: {said}")


MAKE_BASE = """
set -e
mount -t tmpfs -o size=3g tmpfs "$0"
debootstrap --variant=minbase --include="$1" bookworm "$0" >&2 ||
    { tail -n 5 "$0/debootstrap/debootstrap.log" >&2; exit 1; }
rm -rf "$0"/var/cache/apt/archives/*.deb "$0"/var/lib/apt/lists/* "$0"/usr/share/doc/* "$0"/usr/share/man/*
tar --one-file-system --directory "$0" --create --file "$2" .
"""
"""In memory: dpkg syncs every file, which takes minutes on a disk."""


def make_base(cache: Path) -> Path:
    """The image that the Dockerfile begins with, as an archive made of Debian's packages, over the host's network."""
    archive = cache / f"base-{digest(PACKAGES, MAKE_BASE)}.tar"
    with locked(cache / "lock", fcntl.LOCK_EX):
        if not archive.exists():
            with tempfile.TemporaryDirectory(dir=cache) as name:
                part = Path(name) / "base.tar"
                root = Path(name) / "root"
                root.mkdir()
                alone = [word for word in NAMESPACES if word != "--net"]
                words = (*alone, "sh", "-c", MAKE_BASE, str(root), PACKAGES, str(part))
                attempt("the base image is made by debootstrap", *words, timeout=600)
                part.rename(archive)
        archive.touch()
    return archive


def make_wheels(cache: Path) -> Path:
    """A folder with all wheels of the image, fetched by this machine's pip, for it knows the way."""
    constraints = ROOT / "constraints.txt"
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = ("torch==2.13.0", "setuptools>=77", *needed)
    folder = cache / f"wheels-{digest(constraints.read_text(), *wanted, sys.version)}"
    with locked(cache / "lock", fcntl.LOCK_EX):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=cache) as name:
                part = Path(name) / "wheels"
                pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check")
                words = (*pip, "--constraint", str(constraints), "--dest", str(part), *wanted)
                attempt("the image's wheels are fetched", *words, timeout=600)
                part.rename(folder)
        folder.touch()
    return folder


GET_COMPOSE_V2 = """
set -e
cd "$0"
mkdir -p lists/partial cache/archives/partial
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie main" > sources
get="apt-get -q -q -o Dir::Etc::sourcelist=$0/sources -o Dir::Etc::sourceparts=- -o Dir::State::lists=$0/lists
    -o Dir::Cache=$0/cache -o APT::Sandbox::User=root -o Acquire::Languages=none -o Acquire::Retries=3"
$get update
$get download docker-compose
dpkg-deb -x docker-compose_*.deb unpacked
install -D -m 755 unpacked/usr/libexec/docker/cli-plugins/docker-compose plugin/cli-plugins/docker-compose
docker --config "$0/plugin" compose version
"""
"""From the Debian after the one that has 1.29; nothing of the system is changed."""


def make_compose_v2(cache: Path) -> None:
    """Compose v2 for `docker`, where it has none; where it can't be had, it is said that it is not tested."""
    if "v2" in compose_commands():
        return
    folder = cache / f"docker-{digest(GET_COMPOSE_V2)}"
    with locked(cache / "lock", fcntl.LOCK_EX), tempfile.TemporaryDirectory(dir=cache) as name:
        try:
            if not folder.exists():
                attempt("Compose v2 is fetched", "sh", "-c", GET_COMPOSE_V2, name, timeout=600)
                (Path(name) / "plugin").rename(folder)
            folder.touch()
        except Skipped as why:
            say(f"Compose v2 is NOT TESTED: {why}")
            return
    os.environ["DOCKER_CONFIG"] = str(folder)
    compose_commands.cache_clear()


def forget_old(cache: Path) -> None:
    """What was made for other versions and not touched for a week."""
    now_s = time.time()
    for kind in ("base-*.tar", "wheels-*", "docker-*"):
        for made in cache.glob(kind):
            with contextlib.suppress(OSError):
                if now_s - made.stat().st_mtime > KEPT_S:
                    made.unlink() if made.is_file() else shutil.rmtree(made)


def digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def come_first(name: str) -> None:
    """The group of all containers weighs 64 processes: by itself it weighs one, however many are in it."""
    for file, value in ((f"cpu/{name}/cpu.shares", 64 * 1024), (f"{name}/cpu.weight", 64 * 100)):
        group = Path("/sys/fs/cgroup") / file
        # Version 1 of control groups has the first file, version 2 the other one, and neither is needed.
        if (group.parent.parent / "cgroup.procs").exists():
            with contextlib.suppress(OSError):
                group.parent.mkdir()
                group.write_text(str(value))


def remove_cgroups(name: str) -> None:
    """The engine's groups, of which no process is left."""
    groups = Path("/sys/fs/cgroup")
    parents = [*groups.glob(f"*/{name}"), *groups.glob(name)]

    def remove() -> None:
        for parent in parents:
            found = [Path(root) for root, _, _ in os.walk(parent)]
            for folder in sorted(found, key=lambda path: -len(path.parts)):
                with contextlib.suppress(OSError):
                    folder.rmdir()

    until_gone(remove, parents)


def until_gone(remove: Callable[[], None], paths: list[Path]) -> None:
    """Again while processes that were killed are still on their way out, and at most for some seconds."""
    ends_s = time.monotonic() + 20
    remove()
    while any(path.exists() for path in paths) and time.monotonic() < ends_s:
        time.sleep(0.1)
        remove()


@contextlib.contextmanager
def engine(folder: Path) -> Iterator[None]:
    """dockerd on a socket of its own; DOCKER_HOST names it. To be called in namespaces, which end it.

    Raises:
        Skipped: it does not start, with its last words.
    """
    sh("ip", "link", "set", "lo", "up")
    socket = folder / "docker.sock"
    command = [
        *("dockerd", "--storage-driver=overlay2", f"--data-root={folder / 'data'}", f"--exec-root={folder / 'exec'}"),
        *(f"--pidfile={folder / 'pid'}", f"--host=unix://{socket}", "--bridge=none"),
        # The machine's own settings for an engine are not meant for this one.
        *(f"--cgroup-parent=/{folder.name}", f"--config-file={folder / 'daemon.json'}"),
    ]
    (folder / "daemon.json").write_text("{}")
    log = folder / "dockerd.log"
    with log.open("wb") as opened:
        process = subprocess.Popen(command, stdout=opened, stderr=opened)
    # An engine on a slow machine may take its time; Compose 1.29 gives up after a minute.
    os.environ.update(DOCKER_HOST=f"unix://{socket}", COMPOSE_HTTP_TIMEOUT="600")
    try:
        await_that("the engine answers", lambda: process.poll() is not None or answers(), 600)
        if process.poll() is not None:
            raise SystemExit(f"dockerd ended with {process.returncode}")
    except SystemExit as ended:
        raise Skipped(f"the engine does not start here: {ended}; {log.read_text()[-1500:]}") from None
    yield


def answers() -> bool:
    try:
        return subprocess.run(["docker", "version"], check=False, capture_output=True, timeout=60).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def make_image(folder: Path, base: Path, wheels: Path) -> None:
    """The image of the Dockerfile, from the sources here, on the base; packages come from the folder of wheels."""
    sh("docker", "import", str(base), BASE)
    say("the base is imported")
    context = folder / "context"
    context.mkdir()
    for name in ("Dockerfile", ".dockerignore", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, context / name)
    shutil.copytree(ROOT / "diloco_node", context / "diloco_node", ignore=shutil.ignore_patterns("__pycache__"))
    with serving(wheels) as address:
        pip = f"PIP_ARGS=--no-index --find-links {address}"
        sh("docker", "build", "--network", "host", "--tag", "diloco-node", "--build-arg", pip, str(context))
    say("the image is built")


@contextlib.contextmanager
def serving(wheels: Path) -> Iterator[str]:
    """The folder as pages on loopback: in the build's context the wheels would be copied three times."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(wheels))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def finish(work: Callable[[], dict[str, Any]]) -> int:
    """Do it, print what it found as one JSON object, `{"skipped": why}` too; the exit code."""
    try:
        found, code = work(), 0
    except Skipped as skipped:
        found, code = {"skipped": str(skipped)}, SKIPPED
        say(f"NOT TESTED on an engine: {skipped}")
    sys.stdout.write(json.dumps(found) + "\n")
    return code

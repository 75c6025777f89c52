"""A folder that is an older copy, and damage in each kind of file: the region comes back by itself."""

import contextlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from diloco_node.daemon.run_history import HISTORY_NAME
from diloco_node.lab.demo.region_processes import RegionProcess, free_ports
from diloco_node.storage.store import STATES_KEPT
from diloco_node.storage.tensor_files import named_version
from tests.kit.cluster_kit import Cluster, all_train

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]

BACK_S = 120.0
"""A region that is damaged has so long to be in merges again; what does not come back at all must not take for ever."""

KINDS_MIN = 10
"""Of files in a folder: ledger, vote, states, payloads, the learner's checkpoints and counters, and what is beside."""


@pytest.mark.long
async def test_an_older_copy_of_a_folder_counts_as_a_lost_one_until_it_has_caught_up(cluster: Cluster) -> None:
    """A copy is put in the folder's place. Later another one runs beside the region that goes on in the folder."""
    await cluster.start()
    await cluster.until_trains()
    await cluster.until_commits(4)
    victim = cluster.others(await cluster.until_leader())[0]
    original = cluster.regions[victim]
    older = copied(cluster, victim, "older")
    await cluster.until_commits(8)
    await cluster.kill(victim)
    shutil.rmtree(original.state_dir)
    shutil.copytree(older, original.state_dir)
    await cluster.start(victim)
    await until_found_out(cluster, victim)
    await cluster.until_merged(victim, why="after it came back as an older copy")

    twin = copied(cluster, victim, "twin")
    await cluster.until_commits(4)
    (port, admin_port) = free_ports(2)
    text = cluster.config.read_text().replace(
        "admin_port = " + str(original.admin_port), f'admin_port = {admin_port}\nlisten = "127.0.0.1:{port}"'
    )
    shutil.copytree(cluster.folder / "certs", twin.parent / "certs")
    (twin.parent / "run.toml").write_text(text)
    clone = RegionProcess(victim, admin_port, twin)
    await clone.start(twin.parent / "run.toml")
    try:
        await until_found_out(cluster, victim)
        await cluster.until_commits(4, cluster.others(victim), why="beside a clone")
    finally:
        await clone.stop()
    if victim not in cluster.running():
        await cluster.start(victim)
    await cluster.until_merged(victim, why="after its clone was stopped")
    await cluster.end()
    cluster.check_equal()


def copied(cluster: Cluster, name: str, place: str) -> Path:
    """Copy a folder while its daemon writes, as a backup does."""
    folder = cluster.folder.parent / place / name
    names = shutil.ignore_patterns("*.sock", "*.tmp", "logs")
    for _ in range(20):
        with contextlib.suppress(shutil.Error):  # a file was renamed meanwhile
            return shutil.copytree(cluster.regions[name].state_dir, folder, ignore=names, dirs_exist_ok=True)
    raise AssertionError(f"the folder of {name} can't be copied")


async def until_found_out(cluster: Cluster, name: str) -> None:
    """Until each other region names the copy, by the newest start of the folder."""
    others = cluster.others(name)

    def sightings(status: dict[str, Any]) -> list[tuple[int, int]]:
        notes = [note for note in status["notes"] if f"the folder of {name} is an older copy" in note["text"]]
        return [(note["at_ns"], note["count"]) for note in notes]

    # The notes, for the alert is gone as soon as the folder is named anew.
    before = {other: sightings(cluster.regions[other].status) for other in others}
    await cluster.until(
        f"{name} is found out",
        lambda now: all(sightings(status) not in ([], before[other]) for other, status in now.items()),
        others,
    )


REWRITTEN = frozenset(
    {
        HISTORY_NAME,
        "node.json",
        "trainer.json",
        "admin.port",
        "admin.token",
        "learner.json",
        "learner.process",
        "ledger.end",
        "lock",
        "report.json",
    }
)
"""Written by every start, for people only, or a hint: no run needs what is lost with them, so nothing need be kept."""

TOGETHER = (
    {"manifest.json", "learner/checkpoints/learner-N-N.safetensors", "payloads/fN-vN-N.bin"},
    {"disk.id", "learner/trained-N", "state/fN-vN.bin"},
)
"""Kinds that are damaged at once: what one is found to be keeps nobody from reading the other."""


def kinds(folder: Path) -> dict[str, Path]:
    """The newest file of each kind below a region's folder: its path with all numbers taken out, without the logs."""
    found: dict[str, Path] = {}
    files: list[tuple[float, str, Path]] = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # its region runs
            if path.is_file() and path.stat().st_size:
                files.append((path.stat().st_mtime, str(path), path))
    for _, _, path in sorted(files):
        kind = re.sub(r"[0-9a-f]{8,}|\d+", "N", str(path.relative_to(folder)))
        if not kind.startswith("logs/") and ".damaged" not in kind and not kind.endswith(".tmp"):
            found[kind] = path
    return dict(sorted(found.items()))


def flip(path: Path) -> bytes:
    """Turn one bit in the middle of the file; what it holds now."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)
    return bytes(data)


def truncate(path: Path) -> bytes:
    """Cut the file in half; what it holds now."""
    data = path.read_bytes()[: path.stat().st_size // 2]
    path.write_bytes(data)
    return data


DAMAGES: tuple[Callable[[Path], bytes], ...] = (flip, truncate)


def is_kept(folder: Path, path: Path, data: bytes) -> bool:
    """Whether what was damaged is still there: under its name, for nobody had to read it, or moved aside."""
    places = [path, *folder.parent.rglob(f"*{path.name}*"), *folder.rglob("*.damaged*")]
    return any(place.is_file() and place.read_bytes().startswith(data) for place in places)


def is_pruned(folder: Path, path: Path) -> bool:
    """Whether a payload is older than what a region keeps: nobody had to read it, and the run went on."""
    named = named_version(path)
    if named is None or path.parent.name != "payloads":
        return False
    fragment, version = named
    states = [one for one in map(named_version, (folder / "state").iterdir()) if one and one[0] == fragment]
    return sum(state >= version for _, state in states) >= STATES_KEPT


@pytest.mark.long
async def test_a_region_comes_back_from_damage_in_each_kind_of_file(cluster: Cluster) -> None:
    """One region, one kind of file or two after the other, while the two others go on. Nobody has to do anything.

    A bit of every second kind is turned, and the others are cut. tests/storage does both to each kind. What every start
    writes anew is damaged all at once: the region starts as if it were not there.
    """
    await cluster.start()
    await cluster.until_trains()
    # Until there are states and payloads of several versions, and a checkpoint of the learner.
    await cluster.until("versions", lambda now: min(min(one["versions"]) for one in now.values()) >= 10)
    leader = await cluster.until_leader()
    victim = cluster.others(leader)[0]
    others = cluster.others(victim)
    folder = cluster.regions[victim].state_dir
    lost: list[str] = []
    seen: set[str] = set()
    while not seen.issuperset(kinds(folder)):
        await cluster.kill(victim)
        waiting = {kind: path for kind, path in kinds(folder).items() if kind not in seen}
        first = next(iter(waiting), "")
        group = next((group for group in TOGETHER if first in group), {first})
        hit = [kind for kind, path in waiting.items() if path.name in REWRITTEN]
        hit = hit or [kind for kind in waiting if kind in group]
        named = ", ".join(hit)
        damaged: dict[Path, bytes] = {}
        for kind in hit:
            damaged[waiting[kind]] = DAMAGES[len(seen) % len(DAMAGES)](waiting[kind])
            seen.add(kind)
        await cluster.start(victim)
        try:
            await cluster.until(f"it trains after damage to {named}", all_train, [victim], wait_s=BACK_S)
            now = await cluster.until_merged(victim, why=f"after damage to {named}", wait_s=BACK_S)
        except AssertionError as error:
            lost.append(f"{named}: {error}")
            await cluster.kill(victim)
            cluster.wipe(victim)
            await cluster.start(victim)
            await cluster.until_merged(victim, why="with an empty folder")
        else:
            # A killed learner goes on as the same incarnation, and writes its own count again.
            rewritten = {*REWRITTEN, f"trained-{now[victim]['learner']['incarnation']}"}
            for path, data in damaged.items():
                needless = path.name in rewritten or not data
                if not needless and not is_kept(folder, path, data) and not is_pruned(folder, path):
                    lost.append(f"{named}: the damaged {path.name} is gone")
        await cluster.until_commits(1, others)
    assert not lost, "\n\n".join(lost)
    assert len(seen) >= KINDS_MIN, seen
    await cluster.until_trains()
    await cluster.until_commits(4)
    await cluster.end()
    cluster.check_equal()

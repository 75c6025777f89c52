"""A made-up demo: `demo.json` names processes that sleep as supervisors; others carry the marks of their children."""

import os
import subprocess
import sys
from pathlib import Path

from diloco_node.lab.chaos.demo_processes import DemoFile
from diloco_node.unix_sockets import Process, process_of
from tests.kit.waiting import until

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def identity(process: subprocess.Popen[bytes]) -> Process:
    found = process_of(process.pid)
    assert found is not None
    return found


class MadeUpDemo:
    """Regions `a` and `b`, each with a supervisor, a daemon and a learner that sleep."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        for region in "ab":
            supervisor = self.start(f"{region}.supervisor", {})
            for part in ("daemon", "learner"):
                self.start_child(region, part, supervisor.pid)
        self.save()

    def start(self, name: str, env: dict[str, str], command: list[str] = SLEEP) -> subprocess.Popen[bytes]:
        self.children[name] = subprocess.Popen(command, env={**os.environ, **env})
        return self.children[name]

    def start_child(self, region: str, part: str, supervisor: int, command: list[str] = SLEEP) -> None:
        state = str((self.folder / region).resolve())
        child = self.start(f"{region}.{part}", {"DILOCO_STATE": state, "DILOCO_CHILD": f"{part}-{supervisor}"}, command)
        until(lambda: f"DILOCO_CHILD={part}".encode() in Path(f"/proc/{child.pid}/environ").read_bytes())

    def save(self) -> DemoFile:
        supervisors = {region: identity(self.children[f"{region}.supervisor"]) for region in "ab"}
        file = DemoFile(self.folder, process_of(os.getpid()), supervisors)  # type: ignore[arg-type]
        file.save()
        return file

    def pid(self, name: str) -> int:
        return self.children[name].pid

    def ended(self) -> dict[str, int]:
        """Of those that have ended, by which signal."""
        return {name: -child.returncode for name, child in self.children.items() if child.poll() is not None}

    def until_ended(self, *names: str) -> None:
        until(lambda: set(names) <= self.ended().keys())

    def state(self, name: str) -> str:
        return Path(f"/proc/{self.pid(name)}/stat").read_text().rpartition(")")[2].split()[0]

    def clear(self) -> None:
        for child in self.children.values():
            child.kill()
            child.wait()

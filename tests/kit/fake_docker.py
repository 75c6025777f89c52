"""A program `docker` for PATH: it keeps containers in a file, notes what it is asked, and runs `exec` right here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PROGRAM = """#!{python} -SE
import json, os, sys
from pathlib import Path

folder = Path({folder!r})
state = json.loads((folder / "state.json").read_text())
words = sys.argv[1:]
with (folder / "calls.jsonl").open("a") as calls:
    calls.write(json.dumps(words) + "\\n")
verb, name = words[0], words[-1]

def refuse(text):
    sys.exit("Error response from daemon: " + text + "\\nSee 'docker --help'.")

if state["refuses"] and verb in (state["refuses"], "anything"):
    refuse("on strike")
if verb == "ps":
    label = words[words.index("--filter") + 1]
    assert label == "label=com.docker.compose.project" and "--all" in words, words
    print("\\n".join(state["containers"]))
elif verb == "inspect":
    print(json.dumps([state["containers"][key] for key in words[3:]]))
elif verb == "exec":
    at = words.index("python")
    container = state["containers"][words[at - 1]]
    os.environ.update(one.split("=", 1) for one in container["Config"]["Env"])
    with (folder / "environ.json").open("w") as file:
        json.dump(dict(os.environ), file)
    code = state["exec_fails"]
    if code:
        sys.exit(code)
    os.execv({python!r}, [{python!r}, *words[at + 1:]])
else:
    if verb == "unpause" and state["containers"][name]["State"]["Status"] != "paused":
        refuse("Container " + name + " is not paused")
    becomes = {{"kill": "exited", "stop": "exited", "start": "running", "pause": "paused", "unpause": "running"}}
    state["containers"][name]["State"]["Status"] = becomes[verb]
    (folder / "state.json.tmp").write_text(json.dumps(state))
    (folder / "state.json.tmp").replace(folder / "state.json")
    print(name)
"""


class FakeDocker:
    """The program lies in `bin` of the folder.

    Args:
        environment: of each container that is added.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.bin = folder / "bin"
        self.bin.mkdir(parents=True)
        program = self.bin / "docker"
        program.write_text(PROGRAM.format(python=sys.executable, folder=str(folder)))
        program.chmod(0o755)
        self._save({"containers": {}, "refuses": "", "exec_fails": 0})

    def add(
        self, service: str, *, project: str = "run", status: str = "running", region: bool = True, **labels: str
    ) -> None:
        """A container as Compose makes it: of a region, or of another service."""
        environment = {**self.environment, "WAN_REGION": service} if region else {}
        state = self._state()
        state["containers"][f"id-{project}-{service}"] = {
            "Id": f"id-{project}-{service}",
            "Name": f"/diloco-{service}",
            "State": {"Status": status},
            "Config": {
                "Env": [f"{key}={value}" for key, value in environment.items()],
                "Labels": {"com.docker.compose.project": project, "com.docker.compose.oneoff": "False", **labels},
            },
        }
        self._save(state)

    def add_duplicate(self, service: str, key: str, *, status: str) -> None:
        """Another container of a region, as an interrupted `docker compose up` leaves it; listed last."""
        state = self._state()
        other = {**state["containers"][f"id-run-{service}"], "Id": key, "Name": f"/{key}", "State": {"Status": status}}
        self._save({**state, "containers": {**state["containers"], key: other}})

    def refuse(self, verb: str) -> None:
        """That verb fails from now on; "anything": all do."""
        self._save({**self._state(), "refuses": verb})

    def fail_exec(self, answer: int | str) -> None:
        """What `exec` ends with: a code, or 1 and a text."""
        self._save({**self._state(), "exec_fails": answer})

    def status(self, service: str) -> str:
        return str(self._state()["containers"][f"id-run-{service}"]["State"]["Status"])

    def calls(self) -> list[list[str]]:
        """What changed something: without `ps` and `inspect`."""
        file = self.folder / "calls.jsonl"
        found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [words for words in found if words[0] not in ("ps", "inspect")]

    def _state(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "state.json").read_text()))

    def _save(self, state: dict[str, Any]) -> None:
        (self.folder / "state.json").write_text(json.dumps(state))

"""docker-compose.yml on a real engine: four containers train, one is cut off in two ways, and all end equal.

Run as a module (`python -m`), as root: exit code 0 and one JSON object when everything held, 77 and the reason when
it can't run here. It needs the programs of a Docker engine (dockerd, docker), docker-compose 1.29 or `docker compose`,
and debootstrap; .ci/system installs them. The engine is one of its own, see engine_kit.py: another engine and its
containers are not touched, and nothing is left.
"""

import json
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.kit.commands import NO_FORK_SERVER, SMALL_MODEL
from tests.kit.engine_kit import (
    Skipped,
    await_that,
    compose_commands,
    engine,
    finish,
    make_image,
    run_isolated,
    say,
    sh,
)
from tests.kit.repository import ROOT

NAMES = ("us-central", "us-east", "us-south", "us-west")
PORTS = {"us-east": 7411, "us-central": 7412, "us-south": 7413, "us-west": 7414, "us-north": 7415}
"""The last one is that of `docker/us-north.yml`, which is added and leaves again."""
ADDRESS = "10.211.77.14"
SETTINGS = {"DILOCO_RUN__STEPS": "0", "DILOCO_MODEL__SCHEDULE_STEPS": "600", "DILOCO_MODEL__EVAL_WINDOWS": "8"}
SETTINGS |= NO_FORK_SERVER | SMALL_MODEL
"""No end of its own: the test ends it."""
HEALTH_INTERVAL = "3s"
"""The image's own check, but more often: it is waited for."""

TRAINS_ON = ("disconnect",)
PATIENCE_S = 600.0
"""For what comes true within seconds on a quiet machine."""
OUTAGES = (("disconnect",), ("kill",))
"""For each Compose that is here, of those in docs/compose.md. Daemons that stand still: tests/e2e/test_stalls.py."""

PROGRAM = (sys.executable, "-c", "import sys; from diloco_node.main import main; sys.exit(main())")


class Run:
    """The containers of one `up`. Files of theirs are copied to `folder`."""

    def __init__(self, compose: list[str], folder: Path) -> None:
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        override = folder / "override.json"
        changed = {"environment": SETTINGS, "healthcheck": {"interval": HEALTH_INTERVAL}}
        override.write_text(json.dumps({"services": dict.fromkeys(NAMES, changed)}))
        files = [ROOT / "docker-compose.yml", override]
        named = [word for file in files for word in ("--file", str(file))]
        added = folder / "added.json"
        added.write_text(json.dumps({"services": {"us-north": changed}}))
        more = [word for file in (ROOT / "docker" / "us-north.yml", added) for word in ("--file", str(file))]
        project = ("--project-name", "diloco-test")
        self.command = [*compose, *named, *project]
        self.command_with_added = [*compose, *named, *more, *project]

    def do(self, *words: str, check: bool = True) -> str:
        return sh(*self.command, *words, check=check)

    def do_with_added(self, *words: str) -> str:
        """With the service that is added to a run."""
        return sh(*self.command_with_added, *words)

    def inspect(self, name: str, what: str) -> str:
        return sh("docker", "inspect", "--format", what, f"diloco-{name}").strip()

    def python(self, name: str, code: str) -> str:
        return self.do("exec", "-T", name, "python", "-c", code)

    def status(self, name: str) -> dict[str, Any]:
        """Over the port published on loopback; {} when nobody answers."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://127.0.0.1:{PORTS[name]}/api/v1/status", timeout=30) as answer:
                document: dict[str, Any] = json.load(answer)
        except (OSError, ValueError):
            return {}
        return document

    def count(self, name: str, what: str) -> int:
        """A number of a region that answers."""
        document: dict[str, Any] = {}

        def answers() -> bool:
            document.update(self.status(name))
            return bool(document)

        await_that(f"{name} answers", answers, PATIENCE_S)
        return int(document.get(what) or 0)

    def rounds(self, name: str) -> int:
        """Rounds committed; 0 as well when it does not answer: for conditions that are waited for."""
        return int(self.status(name).get("rounds_committed") or 0)

    def learner_steps(self, name: str) -> tuple[int, int]:
        """Steps of a region's learner, and how many of them merges of every fragment have; 0 without one."""
        learner = self.status(name).get("learner") or {"step": 0, "positions": []}
        return learner["step"], min((position["included_step"] for position in learner["positions"]), default=0)

    def pids(self, name: str) -> dict[str, int]:
        """The processes of a region, by their numbers in its container; {} when it does not answer."""
        return dict(self.status(name).get("pids") or {})

    def is_level(self) -> bool:
        """All regions hold the same commits, give or take what is on its way, and us-west takes part again."""
        rounds = [self.rounds(name) for name in NAMES]
        return min(rounds) > 0 and max(rounds) - min(rounds) <= 2

    def finish(self) -> None:
        """By the operator's port of one region, for all; its token is for the region's own user."""
        name = NAMES[0]
        token = self.do("exec", "-T", "--user", "diloco", name, "cat", f"/state/{name}/admin.token").strip()
        address = f"http://127.0.0.1:{PORTS[name]}/api/v1/finish"
        request = urllib.request.Request(address, method="POST", headers={"Authorization": f"Bearer {token}"})

        def is_accepted() -> bool:
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return bool(answer.status == 202)
            except urllib.error.HTTPError:
                raise
            except OSError:
                return False

        await_that("the end is accepted", is_accepted, PATIENCE_S)

    def logs(self) -> str:
        return "".join(f"--- {n}\n{self.do('logs', '--tail=40', n, check=False)}" for n in ("certs", *NAMES))


def require(condition: object, what: str) -> None:
    if not condition:
        raise SystemExit(f"it does not hold: {what}")


CAPABILITIES = """
import pathlib
for folder in pathlib.Path("/proc").glob("[0-9]*"):
    # A word of its own: this program's text has it too.
    if b"diloco_node.daemon" in (folder / "cmdline").read_bytes().split(bytes(1)):
        text = (folder / "status").read_text()
        print(*(line.split()[1] for line in text.splitlines() if line.startswith(("Uid", "CapEff", "NoNewPrivs"))))
"""
REACH = """
import socket
for host, port, patience_s in (("10.211.77.14", 7400, 60), ("10.211.77.14", 7401, 5), ("10.211.78.14", 7401, 5)):
    with socket.socket() as sock:
        sock.settimeout(patience_s)
        print(host, port, "open" if sock.connect_ex((host, port)) == 0 else "closed")
"""


def check_walls(run: Run) -> None:
    """What a region may, and whom it reaches."""
    found = run.python("us-east", CAPABILITIES).split()
    require(found == ["10001", "0000000000000000", "1"], f"the daemon has no privileges: {found}")
    reached = run.python("us-east", REACH).split()
    require(reached[2::3] == ["open", "closed", "closed"], f"regions reach each other's one port only: {reached}")
    said = run.do("logs", "us-west")
    require("us-west on eth" in said and "out 2Gbit/s, in 3Gbit/s" in said, f"the link is shaped: {said[-2000:]}")
    has_netem = "DELAY, JITTER AND LOSS ARE NOT EMULATED" not in said
    shown = run.do("exec", "-T", "us-west", "tc", "-s", "qdisc")
    require(has_netem == ("qdisc netem" in shown), "it is said loudly when delay is not emulated")
    say(f"links are shaped, {'with' if has_netem else 'WITHOUT'} delay")


def check_commands(run: Run) -> None:
    """Those of docs/compose.md that only look, and a cut of one link."""
    ports = [str(PORTS[name]) for name in NAMES]

    def shows_all() -> bool:
        inside = run.do("exec", "-T", "us-east", "diloco-node", "status", "7401", check=False)
        outside = sh(*PROGRAM, "status", *ports, cwd=ROOT, check=False)
        return "us-east" in inside and all(name in outside for name in NAMES)

    await_that("status shows all, inside and outside", shows_all, PATIENCE_S)
    require(run.do("exec", "-T", "us-east", "tail", "-n", "5", "/state/us-east/logs/daemon.log"), "there is a log")
    route = ("exec", "-T", "us-west", "ip", "route")
    run.do(*route, "replace", "blackhole", "10.211.77.11")
    require("blackhole 10.211.77.11" in run.do(*route), "one link is cut")
    run.do(*route, "delete", "blackhole", "10.211.77.11")


def check_one_more(run: Run) -> None:
    """A region is added by the file beside docker-compose.yml, trains, and is taken away, as docs/compose.md says."""
    run.do_with_added("up", "--detach", "us-north")
    await_that("us-north trains", lambda: run.learner_steps("us-north")[0] > 0, PATIENCE_S)
    begun = run.learner_steps("us-north")[0]
    await_that("steps of us-north are merged", lambda: run.learner_steps("us-north")[1] > begun, PATIENCE_S)
    folder = "/state/us-north"
    run.do_with_added("exec", "-T", "--user", "diloco", "us-north", "diloco-node", "drain", folder)
    leader = str(run.status("us-east")["leader"])
    remove = f"diloco-node members remove us-north /state/{leader}/{leader}"
    run.do_with_added("run", "--rm", "us-north-admission", remove)
    await_that("us-north ends", lambda: run.inspect("us-north", "{{.State.Status}}") == "exited", PATIENCE_S)
    require(run.inspect("us-north", "{{.State.ExitCode}}") == "0", "us-north ends with 0")
    shown = run.do("exec", "-T", "--user", "diloco", "us-east", "diloco-node", "members", "list", "/state/us-east")
    require(" former" in next(line for line in shown.splitlines() if "us-north" in line), f"it is none:\n{shown}")
    rounds = run.rounds("us-east")
    await_that("the others go on", lambda: run.rounds("us-east") >= rounds + 2, PATIENCE_S)
    sh("docker", "cp", f"diloco-us-north:{folder}", str(run.folder / "us-north"))


KILL = "import os, sys; os.kill(int(sys.argv[1]), 9)"


def check_deaths(run: Run) -> None:
    """Kill two processes inside a container and stop a whole one; all come back. An outage kills one."""
    before = run.pids("us-south")
    began = run.inspect("us-central", "{{.State.StartedAt}}")
    for part in ("daemon", "learner"):
        run.do("exec", "-T", "--user", "diloco", "us-south", "python", "-c", KILL, str(before[part]))
    run.do("stop", "us-central")
    run.do("start", "us-central")
    require(run.inspect("us-central", "{{.State.StartedAt}}") != began, "a container that is stopped is started again")

    def are_back() -> bool:
        now = run.pids("us-south")
        return all(now.get(part, 0) not in (0, before[part]) for part in ("daemon", "learner"))

    await_that("what was killed is started again", are_back, PATIENCE_S)
    await_that("all hold the same", run.is_level, PATIENCE_S)


def outage(
    run: Run, kind: str, begin: Callable[[], object], end: Callable[[], object], *, trains: bool
) -> dict[str, Any]:
    """Cut us-west off, see that the others go on, bring it back, see that it catches up."""
    begin()
    say(f"{kind}: us-west is cut off")
    begun = run.count("us-east", "rounds_committed")
    # What was on its way may still commit with it: two rounds of the others later it has.
    await_that("the others go on", lambda: run.rounds("us-east") >= begun + 2, PATIENCE_S)
    # A paused region answers nothing; one without network answers on loopback.
    before = {what: run.count("us-west", what) if trains else 0 for what in ("rounds_committed", "inner_steps")}
    rounds = run.count("us-east", "rounds_committed")
    await_that("the others commit without it", lambda: run.rounds("us-east") >= rounds + 4, PATIENCE_S)
    after = {what: run.count("us-west", what) if trains else 0 for what in before}
    others = run.count("us-east", "rounds_committed") - rounds
    end()
    own = after["rounds_committed"] - before["rounds_committed"]
    steps = after["inner_steps"] - before["inner_steps"]
    require(own == 0, f"us-west committed {own} rounds while it was cut off")
    require(steps > 0 or not trains, "us-west trains on")
    level_s = await_that("us-west holds what the others hold", run.is_level, PATIENCE_S)
    again = run.count("us-west", "rounds_committed")
    await_that("and goes on with them", lambda: run.is_level() and run.rounds("us-west") >= again + 2, PATIENCE_S)
    return {
        "kind": kind,
        "commits_of_others": others,
        "steps_of_the_cut": steps if trains else None,
        "level_s": round(level_s, 1),
    }


def scenario(run: Run, kinds: Sequence[str]) -> dict[str, Any]:
    """Up, some outages, the end; what was seen."""
    up_s = time.monotonic()
    run.do("up", "--detach")
    await_that("all regions merge", lambda: min(run.rounds(name) for name in NAMES) >= 4, PATIENCE_S)
    seconds = time.monotonic() - up_s
    if tuple(kinds) == OUTAGES[0]:
        check_walls(run)
        check_commands(run)
        check_one_more(run)
    else:
        check_deaths(run)
    ways = ways_to_cut(run)
    outages = [outage(run, kind, *ways[kind], trains=kind in TRAINS_ON) for kind in kinds]
    # A container that was killed is shaped as it starts again.
    shaped = 1 + len({"disconnect", "kill"} & set(kinds))
    require(run.do("logs", "us-west").count("us-west on eth") == shaped, "the link is shaped anew when it is new")
    await_that(
        "all are healthy",
        lambda: all(run.inspect(name, "{{.State.Health.Status}}") == "healthy" for name in NAMES),
        PATIENCE_S,
    )
    run.finish()
    await_that(
        "all have ended", lambda: all(run.inspect(n, "{{.State.Status}}") == "exited" for n in NAMES), PATIENCE_S
    )
    codes = [run.inspect(name, "{{.State.ExitCode}} {{.RestartCount}}") for name in NAMES]
    require(codes == ["0 0"] * len(NAMES), f"all end with 0, none was restarted: {codes}")
    for name in NAMES:
        sh("docker", "cp", f"diloco-{name}:/state/{name}", str(run.folder / name))
    from diloco_node.lab.demo.demo_report import build_report

    former = [name for name in PORTS if name not in NAMES and (run.folder / name).exists()]
    report = build_report(run.folder, list(NAMES), former=former)
    require(report["equal_digests"], "all regions hold the same bytes")
    require(report["tokens"]["balanced"], f"every token is accounted for: {report['tokens']['faults']}")
    return {
        "seconds_to_four_rounds": round(seconds, 1),
        "outages": outages,
        "rounds_committed": report["rounds_committed"],
        "equal_digests": report["equal_digests"],
        "tokens": report["tokens"],
        "participation": {region["name"]: region["participation"] for region in report["regions"]},
        "seconds": round(time.monotonic() - up_s),
    }


def ways_to_cut(run: Run) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """What begins and ends an outage of us-west: the commands of docs/compose.md."""
    network = ("docker", "network")
    return {
        "disconnect": (
            lambda: sh(*network, "disconnect", "diloco-wan", "diloco-us-west"),
            lambda: sh(*network, "connect", "--ip", ADDRESS, "diloco-wan", "diloco-us-west"),
        ),
        "kill": (lambda: run.do("kill", "us-west"), lambda: run.do("start", "us-west")),
    }


def inside(folder: Path, base: Path, wheels: Path) -> dict[str, Any]:
    """In namespaces of its own: all of it, with what was seen."""
    begun_s = time.monotonic()
    found: dict[str, Any] = {"runs": {}}
    with engine(folder):
        make_image(folder, base, wheels)
        found["image_seconds"] = round(time.monotonic() - begun_s)
        # The first one takes all outages, the other one: both read and drive the same file.
        for compose, kinds in zip(sorted(compose_commands(), reverse=True), OUTAGES, strict=False):
            found["runs"][compose] = up_and_down(Run(compose_commands()[compose], folder / "run"), kinds)
            say(f"with Compose {compose}: all held")
    return found


def up_and_down(run: Run, kinds: Sequence[str]) -> dict[str, Any]:
    """One run from nothing to nothing."""
    try:
        found = scenario(run, kinds)
    except BaseException:
        say(run.logs())
        raise
    run.do_with_added("down", "--volumes", "--timeout", "5")
    for what in (("ps", "--all"), ("volume", "ls"), ("network", "ls", "--filter", "name=diloco")):
        require(not sh("docker", *what, "--quiet").strip(), f"`down` leaves nothing of docker {what[0]}")
    return found


def main(arguments: list[str]) -> int:
    if arguments:
        return finish(lambda: inside(*map(Path, arguments)))
    try:
        return run_isolated([sys.executable, "-m", __spec__.name])
    except Skipped as skipped:
        why = skipped

    def skip() -> dict[str, Any]:
        raise why

    return finish(skip)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

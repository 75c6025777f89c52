"""The protocol told by scenarios: `tests/lab/scenarios/*.txt`, each with its full output.

A scenario is a text: comments, and steps. A step is a command line, and below `----` what real region cores send and
decide while it runs on virtual time. A line begins with the time in seconds and the region; `>` names the receivers.
Heartbeats, acknowledgements and exact repetitions are left out.

`DILOCO_REWRITE=1 pytest tests/lab/test_scenarios.py` writes the output anew; `git diff` then shows how a change to the
code changes the protocol.

Commands:
    regions NAMES [KEY=NUMBER ...]  build the world; the keys are settings, and `slow_NAME` how many times slower a
                                    region's learner steps
    show KINDS                      print only these kinds of lines from here on; see `KINDS`
    run SECONDS                     let time pass
    skip SECONDS                    the same without output
    until TEXT                      let time pass until a line contains the text
    kill | start NAME               a region's daemon
    kill-learner | start-learner NAME
    lose-disk NAME                  kill a region's daemon and learner, and empty its folder
    cut | heal NAME                 a region's links, in both directions
    deafen NAME                     cut a region's links in the direction to it
    cut-bulk | heal-bulk NAME       only the bulk transfers that leave a region: its control messages go on
    finish NAME                     order the end of the run there
    set NAME KEY=NUMBER             order another setting of the run there
    state                           one line per region: its role and its versions
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco_node.core import events as ev
from diloco_node.core import messages as msg
from diloco_node.core.operator_orders import EntryOrdered
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.types import (
    DISK_ID_BYTES,
    Contribution,
    DiscardedBody,
    DiskNamedBody,
    Entry,
    FinishedBody,
    RoundBody,
    SnapshotBody,
)
from diloco_node.lab.sim import setup as sim_setup
from diloco_node.lab.sim.disk import Disk
from diloco_node.lab.sim.world import SECOND
from tests.kit.small_world import Small

SCENARIOS = sorted((Path(__file__).parent / "scenarios").glob("*.txt"))
REWRITES = os.environ.get("DILOCO_REWRITE") == "1"

KINDS = (
    "votes",
    "rounds",
    "bulk",
    "ledger",
    "snapshots",
    "losses",
    "fetches",
    "versions",
    "final",
    "notes",
    "alarms",
    "suspects",
)
"""Kinds of lines: messages of elections, of rounds, about lost steps; transfers; ledger entries on their way to
followers (those of snapshots apart); fetches; applied versions; the end of the run; decisions as the log says them,
with alarms and blame among them."""

UNTIL_S = 60.0

TOGETHER_NS = 5_000_000
"""The same message to several regions within this time is one line."""

ENTRIES_SHOWN = 3
"""Entries of one message; of more only the first and the last number is told."""


class Scenario:
    """Carries out one scenario's commands, and collects the lines."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.lines: list[str] = []
        self._patch = patch
        self._kinds: set[str] = set()
        self._small: Small | None = None
        # The messages that were printed, and the last lines: (time, sender, text, targets).
        self._messages: set[tuple[str, str, str]] = set()
        self._recent: list[tuple[int, str, str, list[str]]] = []
        self._printed = 0

    @property
    def small(self) -> Small:
        assert self._small is not None, "a scenario begins with `regions`"
        return self._small

    def do(self, command: str) -> list[str]:
        """Carry out a command, and return its lines."""
        word, *arguments = command.split(maxsplit=1)
        getattr(self, "do_" + word.replace("-", "_"))(*arguments)
        self._recent = []
        lines, self._printed = self.lines[self._printed :], len(self.lines)
        return lines

    def do_regions(self, text: str) -> None:
        names = [word for word in text.split() if "=" not in word]
        numbers = {key: int(number) for key, number in (word.split("=") for word in text.split() if "=" in word)}
        slower = tuple(numbers.pop(f"slow_{name}", 1) for name in names)
        self._patch.setattr(sim_setup, "NAMES", tuple(names))
        is_even = set(slower) == {1}
        self._small = small = Small(self._patch, len(names), slower=() if is_even else slower, **numbers)
        for host in small.hosts.values():
            self._listen(host)

    def do_show(self, text: str) -> None:
        self._kinds = set(text.split())
        assert self._kinds <= set(KINDS), text

    def do_run(self, seconds: str) -> None:
        self.small.go(float(seconds))

    def do_skip(self, seconds: str) -> None:
        kinds, self._kinds = self._kinds, set()
        self.do_run(seconds)
        self._kinds = kinds

    def do_until(self, text: str) -> None:
        start, small = len(self.lines), self.small
        until_ns = small.world.now_ns + int(UNTIL_S * SECOND)
        small.sim.run_until(lambda: any(text in line for line in self.lines[start:]) or small.world.now_ns > until_ns)
        assert small.sim.checkers.violations == []
        assert small.world.now_ns <= until_ns, f"no line with {text!r} in {UNTIL_S} s"

    def do_kill(self, name: str) -> None:
        self.small.hosts[name].kill_daemon()

    def do_start(self, name: str) -> None:
        self.small.hosts[name].start_daemon()

    def do_kill_learner(self, name: str) -> None:
        self.small.hosts[name].kill_learner()

    def do_start_learner(self, name: str) -> None:
        self.small.hosts[name].start_learner()

    def do_lose_disk(self, name: str) -> None:
        host = self.small.hosts[name]
        host.kill_daemon(is_power_cut=True)
        host.kill_learner(is_power_cut=True)
        host.disk = Disk(id=self.small.world.rng.randbytes(DISK_ID_BYTES), lost=host.disk)

    def do_cut(self, name: str) -> None:
        self.small.cut(name)

    def do_heal(self, name: str) -> None:
        peers = [peer for peer in self.small.hosts if peer != name]
        self.small.heal([(name, peer) for peer in peers] + [(peer, name) for peer in peers])

    def do_deafen(self, name: str) -> None:
        for peer in sorted(self.small.hosts):
            if peer != name:
                self.small.sim.network.cut(peer, name)

    def do_cut_bulk(self, name: str) -> None:
        self._change_bulk(name, 1)

    def do_heal_bulk(self, name: str) -> None:
        self._change_bulk(name, -1)

    def do_finish(self, name: str) -> None:
        self.small.hosts[name].post(ev.FinishOrdered("an operator asks for it"))

    def do_set(self, text: str) -> None:
        name, assignment = text.split()
        host, (key, number) = self.small.hosts[name], assignment.split("=")
        host.post(EntryOrdered(replace(SettingsBody.of(host.core.history.settings), **{key: int(number)})))

    def do_state(self) -> None:
        for name, host in sorted(self.small.hosts.items()):
            if host.core is None:
                self.lines.append(f"{name}: down")
                continue
            view = host.core.view()
            learner = "no learner" if host.learner is None else f"learner {host.learner.incarnation}"
            versions = " ".join(map(str, view.versions))
            self.lines.append(f"{name}: {view.role} in term {view.term}, versions {versions}, {learner}")

    def _change_bulk(self, name: str, cuts: int) -> None:
        for (source, _), link in self.small.sim.network.links.items():
            if source == name:
                link.bulk_cuts += cuts

    def _listen(self, host: Any) -> None:
        """Print a line for what this host's core wants done, before it is done."""
        for effect_type, describe in EFFECTS.items():
            carry_out: Callable[[Any], None] = host.effects.handlers[effect_type]

            def tell(
                effect: Any, describe: Callable[[Any], Any] = describe, carry_out: Callable[[Any], None] = carry_out
            ) -> None:
                line = describe(effect)
                if line is not None and set(line[0].split()) & self._kinds:
                    self._print(host.name, line[1], line[2], may_repeat="votes" in line[0])
                carry_out(effect)

            host.effects.handlers[effect_type] = tell

    def _print(self, name: str, target: str, text: str, *, may_repeat: bool) -> None:
        """Print a line, or add a target to the line of the same message to others a moment ago."""
        now_ns = self.small.world.now_ns
        if (name, target, text) in self._messages and not may_repeat:
            return
        self._messages.add((name, target, text))
        for place, (at_ns, *message, targets) in enumerate(self._recent):
            if message == [name, text] and target and now_ns - at_ns <= TOGETHER_NS:
                targets.append(target)
                self.lines[place - len(self._recent)] = line_of(at_ns, name, targets, text)
                return
        self._recent = [*self._recent[-5:], (now_ns, name, text, [target])]
        self.lines.append(line_of(now_ns, name, [target], text))


def line_of(at_ns: int, name: str, targets: list[str], text: str) -> str:
    arrow = f" > {' '.join(sorted(targets))}" if targets != [""] else ""
    return f"{at_ns / SECOND:7.3f}  {name}{arrow}: {text}"


def steps_of(contribution: Contribution) -> str:
    life = f" of life {contribution.incarnation}" if contribution.incarnation > 1 else ""
    return f"{contribution.learner} ({contribution.step_from}, {contribution.step_to}]{life}"


def entry_text(entry: Entry) -> str:
    body = entry.body
    match body:
        case RoundBody():
            members = ", ".join(steps_of(member.contribution) for member in body.members)
            text = f"version {body.version} of fragment {body.fragment}: {members}"
        case DiscardedBody():
            text = f"discards ({body.step_from}, {body.step_to}] of {body.learner}'s life {body.incarnation}, " + (
                f"fragment {body.fragment}"
            )
        case DiskNamedBody():
            text = f"{body.region}'s folder is {'another one' if body.disk else 'gone'}"
        case SnapshotBody():
            text = f"snapshot of fragment {body.fragment} at version {body.version}"
        case SettingsBody():
            text = f"other settings, H = {body.sync_every}"
        case FinishedBody():
            text = f"the end at versions {' '.join(map(str, body.versions))}"
        case _:
            text = type(body).__name__.removesuffix("Body").lower()
    return f"entry {entry.index}: {text}"


def send_line(effect: ev.Send) -> tuple[str, str, str] | None:
    """(kind, target, text) of a message; None for those that only repeat or count."""
    message = effect.message
    ballot = getattr(message, "ballot", None)
    match message:
        case msg.RequestVote():
            wish = "would you vote for me" if message.pre_vote else "vote for me"
            line = ("votes", f"{wish} in term {message.term}?")
        case msg.RequestVoteReply():
            line = ("votes", f"{'yes' if message.granted else 'no'}, in term {message.term}")
        case msg.TimeoutNow():
            line = ("votes", f"stand for election, {message.successor}")
        case msg.BallotOpened():
            reducers = " ".join(dict.fromkeys(stripe.reducer for stripe in message.stripes))
            line = (
                "rounds",
                f"ballot {ballot} for version {message.version} of fragment {message.fragment}: "
                f"members {' '.join(message.members)}, reducers {reducers}",
            )
        case msg.Contributed():
            line = ("rounds", f"ballot {ballot}: I contribute {steps_of(message.contribution)}")
        case msg.Declined():
            line = ("rounds", f"ballot {ballot}: I decline, {message.reason}")
        case msg.MergeDecided():
            members = ", ".join(map(steps_of, message.contributions))
            line = ("rounds", f"ballot {ballot}: merge {members}")
        case msg.ReductionReported():
            line = ("rounds", f"ballot {ballot}: stripe {message.stripe} is merged")
        case msg.PayloadDurable():
            line = ("rounds", f"ballot {ballot}: the payload is on my disk")
        case msg.AuditDrawn():
            told = "my nonce" if len(message.nonces) == 1 else "it is audited"
            line = ("rounds", f"ballot {ballot}: {told}")
        case msg.ContributionProjected():
            line = ("rounds", f"ballot {ballot}: the projections of my contribution")
        case msg.AppendEntries() if len(message.entries) > ENTRIES_SHOWN:
            line = ("ledger", f"entries {message.entries[0].index} to {message.entries[-1].index}")
        case msg.AppendEntries() if message.entries:
            is_quiet = all(isinstance(entry.body, SnapshotBody) for entry in message.entries)
            line = ("snapshots" if is_quiet else "ledger", "; ".join(map(entry_text, message.entries)))
        case msg.BaseSent():
            line = ("ledger", f"the ledger begins after entry {message.index}")
        case msg.DiscardReported():
            marks = ", ".join(f"({body.step_from}, {body.step_to}] of {body.fragment}" for body in message.bodies)
            line = ("losses", f"lost are {marks}")
        case msg.FinishRequested():
            line = ("rounds", f"please end the run: {message.reason}")
        case _:
            return None
    return line[0], effect.peer, line[1]


def note_line(note: ev.Note) -> tuple[str, str, str]:
    where = f" {note.fragment}/{note.version}" if note.fragment >= 0 and note.version >= 0 else ""
    text = note.text.split("; deadline ")[0].split(", after ")[0]
    kinds = ["notes", *(["suspects"] if note.kind == "suspects" else []), *(["alarms"] if note.is_alarm else [])]
    return " ".join(kinds), "", f"{note.kind}{where}: {text}"


EFFECTS: dict[type, Callable[[Any], tuple[str, str, str] | None]] = {
    ev.Send: send_line,
    ev.Note: note_line,
    ev.SendContribution: lambda effect: (
        "bulk",
        " ".join(sorted({stripe.reducer for stripe in effect.stripes} - {effect.contribution.learner})),
        f"bytes of {steps_of(effect.contribution)}, fragment {effect.contribution.fragment}",
    ),
    ev.SendMerged: lambda effect: ("bulk", " ".join(effect.peers), f"bytes of merged stripe {effect.header.stripe}"),
    ev.FetchState: lambda effect: (
        "fetches",
        effect.peer,
        f"fetches the state of fragment {effect.fragment} at version {effect.version}",
    ),
    ev.FetchPayload: lambda effect: (
        "fetches",
        effect.peer,
        f"fetches the payload of version {effect.version} of fragment {effect.fragment}",
    ),
    ev.OfferVersion: lambda effect: (
        "versions",
        "",
        f"version {effect.version} of fragment {effect.fragment} is applied, and offered to the learner",
    ),
    ev.WriteFinal: lambda _: ("final", "", "writes the final file"),
    ev.StopLearner: lambda effect: ("final", "", f"stops its learner: {effect.reason}"),
}


def play(text: str, patch: pytest.MonkeyPatch) -> str:
    """The scenario with the output that its commands have now."""
    scenario, result, is_output = Scenario(patch), list[str](), False
    for line in text.splitlines():
        is_output = line == "----" or (is_output and line != "")
        if is_output:
            continue
        if line and result and scenario.lines and result[-1] is scenario.lines[-1]:
            result.append("")
        result.append(line)
        if line and not line.startswith("#"):
            lines = scenario.do(line)
            result += ["----", *lines] if lines else []
    return "\n".join(result) + "\n"


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_regions_do_what_the_scenario_says(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = path.read_text()
    output = play(text, monkeypatch)
    if REWRITES:
        path.write_text(output)
    assert output == text or REWRITES, f"to accept it: DILOCO_REWRITE=1 pytest {Path(__file__).name}, then git diff"


def test_a_line_that_changed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (SCENARIOS[0].parent / "vote_refused.txt").read_text()
    other_text = text.replace("> c: no, in term 1", "> c: yes, in term 2", 1)
    assert other_text != text
    assert play(other_text, monkeypatch) == text

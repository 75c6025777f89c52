"""The storm of a demo: its plan, its faults at their times, and its part of the report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from diloco_node.cli.options import parse_option
from diloco_node.config.units import parse_duration
from diloco_node.errors import ConfigError, DilocoError
from diloco_node.lab.chaos import story
from diloco_node.lab.chaos.demo_processes import DemoFile
from diloco_node.lab.chaos.executor import UNDONE, FaultExecutor, StruckFault
from diloco_node.lab.chaos.fault_plan import KINDS, ORDERS, VICTIMS, FaultPlan, PlannedFault, storm
from diloco_node.lab.chaos.fault_script import read_script, script_text
from diloco_node.lab.chaos.story import RunSample, TimedMerge
from diloco_node.lab.demo.demo_options import DemoOptions
from diloco_node.lab.demo.region_processes import RegionProcess, attached_learner
from diloco_node.numeric import NS_PER_S

CALM_S: Final = 10.0
"""Before the training ends nothing is struck for so long, and nothing lasts. A region whose supervisor was killed must
start three processes, import torch, and catch up; then its learner is in the last rounds, and the run ends in order."""

MTBF_DEFAULT: Final = "5s"

POLL_S: Final = 0.25
"""How often the regions are asked in a storm: the times of the report are as fine."""

TOKENS_PLAN_TIMES: Final = 5
"""A storm that ends with a number of tokens is drawn for so many times what they take undisturbed. Then it is calm."""

SCRIPT_NAME: Final = "script.jsonl"

UNGIVEN: Final = "the training ended before its time"
"""Refusal of an order that was never given."""

UNCOMPARED: Final = frozenset(
    {"regions", "folder", "is_json", "has_chaos", "mtbf", "notice", "script", "baseline", "step_time"}
)
"""Options that a demo and its baseline need not share: how many regions (their names are compared), where each is kept,
how it is shown, and what strikes it; `step_seconds` stands for the step time. All other options are compared."""


def comparable(options: DemoOptions, names: Sequence[str], *, step_seconds: float) -> dict[str, Any]:
    """The settings of a demo that its figures hang on, as they stand in its report: by name, fit for JSON.

    names: its regions. step_seconds: what an inner step of the fastest learner takes at least.
    """
    settings = {
        option.name: getattr(options, option.name) for option in fields(options) if option.name not in UNCOMPARED
    }
    return settings | {
        "regions": sorted(names),
        "step_seconds": step_seconds,
        "data": [str(Path(path).resolve()) for path in options.data],
        "command": list(options.command),
        "wan": str(options.wan.resolve()) if options.wan is not None else None,
    }


def read_baseline(file: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The field `training` of an undisturbed demo's report.

    settings: those of the demo that is to be compared with it.

    Orders of a script are no storm.

    Raises ConfigError: it is no report, that of a storm, or that of a demo with other settings.
    """
    try:
        report = json.loads(file.read_text())
        training, chaos = dict(report["training"]), report["chaos"]
        is_storm = chaos is not None and bool(chaos["struck"])
        baseline_settings = {"command": [], **training["settings"]}
        story.compare(training, training, ends_by_tokens=False)  # all that is compared is there
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"--baseline {file} is no report of a demo ({error}): name its report.json") from None
    if is_storm:
        raise ConfigError(f"--baseline {file} is of a storm: name the report of the same demo without faults")
    for name, value in settings.items():
        if name not in baseline_settings or baseline_settings[name] != value:
            baseline_value = json.dumps(baseline_settings.get(name))
            raise ConfigError(
                f"--baseline {file} is of another demo: {name} is {baseline_value} there and {json.dumps(value)} here"
            )
    return training


def earliest_ns(plan: FaultPlan, founders: Sequence[str], work_ns: float) -> int:
    """Return when the members of a plan can have done so much work at the earliest, in time of one region."""
    changes = sorted({fault.at_ns for fault in plan.faults if fault.kind in ("join", "leave")})
    for from_ns, to_ns in pairwise((0, *changes)):
        members = max(1, len(plan.members(founders, from_ns)))
        if work_ns <= members * (to_ns - from_ns):
            return from_ns + int(work_ns / members)
        work_ns -= members * (to_ns - from_ns)
    last_ns = changes[-1] if changes else 0
    return last_ns + int(work_ns / max(1, len(plan.members(founders, last_ns))))


class DemoStorm:
    """Storm over a demo.

    Args:
        options: of the demo. names: its regions. folder: of the demo.
        settings: of the demo, as `comparable` has them: a baseline must have the same.
        tokens_per_second: of the demo, undisturbed; None: not known, so a script is carried out whole.

    Attributes:
        plan: what is struck. With `--tokens` it is much longer than the training should be: the demo ends the storm.
        calm_tokens: with `--tokens`, the storm ends when so many have still to be merged.

    Raises ConfigError: an option, the script or the baseline is wrong.
    """

    def __init__(
        self,
        options: DemoOptions,
        names: Sequence[str],
        folder: Path,
        settings: Mapping[str, Any],
        *,
        tokens_per_second: float | None,
    ) -> None:
        self._options = options
        self._folder = folder
        script = FaultPlan(()) if options.script is None else read_script(options.script, names)
        self.calm_tokens = int(CALM_S * tokens_per_second) if tokens_per_second is not None else 0
        if options.tokens and tokens_per_second is None:
            end_ns = max((fault.at_ns + 1 for fault in script.faults), default=0)
        elif options.tokens and tokens_per_second is not None:
            if options.tokens <= self.calm_tokens:
                raise ConfigError(
                    f"--chaos is calm for the last {self.calm_tokens:,} tokens, {CALM_S:.0f} s of training: take more "
                    "--tokens than that"
                )
            end_ns = int(TOKENS_PLAN_TIMES * options.tokens / tokens_per_second * NS_PER_S)
        else:
            end_ns = int((options.seconds - CALM_S) * NS_PER_S)
            if end_ns <= 0:
                raise ConfigError(f"--chaos is calm for the last {CALM_S:.0f} s: take more --seconds than that")
        self._mtbf = parse_option("--mtbf", options.mtbf or MTBF_DEFAULT, parse_duration)
        self._notice_ns = parse_option("--notice", options.notice, parse_duration).ns if options.notice else 0
        self.plan = script.until(end_ns)
        sure_ns = end_ns
        if options.tokens and tokens_per_second is not None:
            region_rate = tokens_per_second / len(names) / NS_PER_S
            sure_ns = earliest_ns(self.plan, names, (options.tokens - self.calm_tokens) / region_rate)
        if late := [fault for fault in script.faults if fault.kind in ORDERS and fault.at_ns >= sure_ns]:
            raise ConfigError(
                f"{options.script}: {late[0].kind} {late[0].target} at {late[0].at_ns / NS_PER_S:g} s would never be "
                f"given: the demo is calm from {sure_ns / NS_PER_S:g} s on. Take more "
                f"--{'tokens' if options.tokens else 'seconds'}"
            )
        self._names = sorted({*names, *self.plan.joiners})
        if options.has_chaos:
            kills = storm(
                names,
                seed=options.seed,
                mtbf_ns=self._mtbf.ns,
                end_ns=end_ns,
                notice_ns=self._notice_ns,
                script=self.plan,
            )
            self.plan = FaultPlan(tuple(sorted((*self.plan.faults, *kills.faults), key=lambda fault: fault.at_ns)))
        self._baseline = read_baseline(options.baseline, settings) if options.baseline is not None else None
        self._strikes: Sequence[StruckFault] = ()

    @property
    def refusals(self) -> list[str]:
        """Why orders of the script were not carried out, one line each."""
        strikes = (*self._strikes, *self._late_orders)
        return [f"{strike.fault.kind} {strike.fault.target}: {strike.refusal}" for strike in strikes if strike.refusal]

    @property
    def _late_orders(self) -> list[StruckFault]:
        """Orders of the script whose time never came."""
        faults_struck = {strike.fault for strike in self._strikes}
        orders = [fault for fault in self.plan.faults if fault.kind in ORDERS and fault not in faults_struck]
        return [StruckFault(order.at_ns, order, (), refusal=UNGIVEN) for order in orders]

    @property
    def has_open_orders(self) -> bool:
        """Whether an order was given that is neither done nor refused yet."""
        return any(fault.refusal == UNDONE for fault in self._strikes)

    async def run(
        self,
        regions: Sequence[RegionProcess],
        now_ns: Callable[[], int],
        say: Callable[[str], None],
        carry_out: Callable[[PlannedFault], Awaitable[str]] | None = None,
    ) -> None:
        """Strike and have orders carried out, until the plan is at its end. It is left in the folder, as a script."""
        (self._folder / SCRIPT_NAME).write_text(script_text(self.plan))

        def announce(fault: StruckFault) -> None:
            suffix = ": nobody was there" if fault.is_missed else ""
            say(f"chaos: {fault.at_ns / NS_PER_S:6.1f} s  {fault.fault.kind} {fault.fault.target}{suffix}")

        def learner_pid(name: str) -> int | None:
            return next((attached_learner(region.status) for region in regions if region.name == name), None)

        executor = FaultExecutor(
            lambda: DemoFile.load(self._folder),
            now_ns=now_ns,
            on_strike=announce,
            learner_pid=learner_pid,
            carry_out=carry_out,
        )
        self._strikes = executor.strikes
        try:
            await executor.run(self.plan)
        except* DilocoError as errors:
            raise errors.exceptions[0] from None

    def document(
        self, samples: Sequence[RunSample], merges: Sequence[TimedMerge] | None, training: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The report's field `chaos`; what merges tell of single regions is None where not all are known any more."""
        faults = [fault for fault in self._strikes if not fault.is_missed and not fault.is_order]
        counts = Counter((fault.fault.kind, fault.fault.target.part) for fault in faults)
        end_ns = int(training["seconds"] * NS_PER_S)
        lives: dict[str, Any] = dict.fromkeys(("rejoin", "seconds_of", "goodput_there"))
        if merges is not None:
            spans = {name: story.life(name, samples, merges, end_ns=end_ns) for name in self._names}
            lives = {
                "rejoin": story.rejoins(self._strikes, samples, merges),
                "seconds_of": (seconds_of := {name: _seconds_of(lives_of) for name, lives_of in spans.items()}),
                "goodput_there": None
                if self._baseline is None
                else story.goodput_there(
                    training, self._baseline, {name: states["dead"] for name, states in seconds_of.items()}
                ),
            }
        is_drawn = self._options.has_chaos
        return {
            "seed": self._options.seed if is_drawn else None,
            "notice_seconds": self._notice_ns / NS_PER_S or None,
            "mtbf_seconds": self._mtbf.ns / NS_PER_S if is_drawn else None,
            "script": str(self._options.script or self._folder / SCRIPT_NAME),
            "calm_seconds": None if self._options.tokens else CALM_S,
            "calm_tokens": self.calm_tokens if self._options.tokens else None,
            "struck": {
                kind: {victim: counts[kind, victim] for victim in VICTIMS if counts[kind, victim]}
                for kind in KINDS
                if any(counts[kind, victim] for victim in VICTIMS)
            },
            "missed": sum(fault.is_missed for fault in self._strikes),
            "notices": _notices(self._strikes),
            "faults": [fault.document() for fault in (*self._strikes, *self._late_orders)],
            "baseline": str(self._options.baseline) if self._options.baseline is not None else None,
            "compared": story.compare(training, self._baseline, ends_by_tokens=bool(self._options.tokens))
            if self._baseline is not None
            else None,
            **lives,
        }


def _notices(strikes: Sequence[StruckFault]) -> dict[str, Any] | None:
    """How machines took their notices; None where none was given."""
    notices = [fault for fault in strikes if fault.fault.kind == "notice" and not fault.is_missed]
    times_s = [fault.stopped_ns / NS_PER_S for fault in notices]
    kills = sum(fault.kills > 0 for fault in notices)
    return {"count": len(notices), "stopped_seconds_most": max(times_s), "killed": kills} if notices else None


def _seconds_of(spans: Sequence[story.LifeSpan]) -> dict[str, float]:
    """How long a region was in each state."""
    totals: Counter[str] = Counter()
    for span in spans:
        totals[span.state.value] += span.to_ns - span.from_ns
    return {state.value: totals[state.value] / NS_PER_S for state in story.LifeState}


def storm_lines(report: Mapping[str, Any]) -> list[str]:
    """The field `chaos` for people, with what of `training` belongs to it."""
    chaos, training = report["chaos"], report["training"]
    strikes = "; ".join(
        f"{kind} " + ", ".join(f"{count} {victim}" for victim, count in victims.items())
        for kind, victims in chaos["struck"].items()
    )
    notice_s = chaos["notice_seconds"]
    kind = f"a notice of {notice_s:g} s" if notice_s else "a kill"
    source = (
        f"seed {chaos['seed']}, {kind} per {chaos['mtbf_seconds']:g} s" if chaos["mtbf_seconds"] else chaos["script"]
    )
    orders = [fault for fault in chaos["faults"] if "refused" in fault]
    calm = f"{chaos['calm_tokens']:,} tokens" if chaos["calm_seconds"] is None else f"{chaos['calm_seconds']:.0f} s"
    lines = [
        f"storm              {source}: {strikes or 'nothing was struck'}; {chaos['missed']} met nobody; the last "
        f"{calm} were calm",
        f"commits            {training['commits_per_minute']:.0f} a minute, at most "
        f"{training['longest_gap_seconds']:.1f} s between two",
    ]
    lines += [
        f"at {order['at_seconds']:<16.1f}{order['do']} {order['target']}: "
        + (f"REFUSED: {order['refused']}" if order["refused"] else f"done after {order['took_seconds']:.1f} s")
        for order in orders
    ]
    if notices := chaos["notices"]:
        lines.append(
            f"notices            {notices['count']} machines stopped within {notices['stopped_seconds_most']:.1f} s; "
            f"{notices['killed']} had to be killed"
        )
    for victim, rejoin in (chaos["rejoin"] or {}).items():
        median, most = rejoin["seconds_median"], rejoin["seconds_most"]
        times = "-" if median is None else f"median {median:.1f} s, at most {most:.1f} s"
        lines.append(
            f"in merges again    {victim}: {times}, of {rejoin['count']}; {rejoin['struck_again']} struck again before "
            f"that, {rejoin['never']} not in time"
        )
    comparison = chaos["compared"]
    for name, seconds_of in (chaos["seconds_of"] or {}).items():
        goodput_of = comparison["goodput_of"] if comparison is not None else None
        goodput = "" if goodput_of is None else f", goodput {_percent(goodput_of.get(name))}"
        spent = ", ".join(f"{seconds:.0f} s {state}" for state, seconds in seconds_of.items() if seconds)
        lines.append(
            f"  {name:<17}{training['tokens_merged_of'][name]:,} tokens merged{goodput}, participation "
            f"{_percent(training['participation_of'][name])}; {spent}"
        )
    if comparison is None:
        lines.append("goodput            unknown: run the same demo undisturbed, and give its report: --baseline FILE")
    else:
        if notice_s and chaos["goodput_there"] is not None:
            lines[-1] += f"; {_percent(chaos['goodput_there'])} of those in the time that learners were there"
        loss = comparison["loss"]
        lines.append(
            f"goodput            {_percent(comparison['goodput'])} of the tokens a second that the undisturbed run "
            "merged"
        )
        if loss is not None:
            lines.append(
                f"held-out loss      {loss['own']:.4f} at {loss['tokens']:,} tokens, undisturbed "
                f"{loss['undisturbed']:.4f} at {loss['undisturbed_tokens']:,}: {loss['change']:+.2%}"
            )
    if chaos["seconds_of"] is None:
        lines.append("regions            unknown: the ledger is summed up, so which learner was in which merge is, too")
    return lines


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"

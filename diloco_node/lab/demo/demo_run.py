"""`diloco-node demo`: several regions on one machine, as real processes with real links, and a report at the end."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any, Final

from diloco_node.cli.options import parse_option
from diloco_node.cli.page.merged import MergedRegions, dashboard_server
from diloco_node.cli.page.page_report import PAGE_NAME, write_page
from diloco_node.cli.places import targets_in
from diloco_node.cli.start import check_command
from diloco_node.cli.tables import region_cells, table_lines
from diloco_node.config.budget_settings import parse_ceiling
from diloco_node.config.units import parse_duration
from diloco_node.errors import INTERRUPTED_CODE, ConfigError, DilocoError
from diloco_node.health.reading import human_bytes
from diloco_node.lab.chaos import story
from diloco_node.lab.demo.course import CourseRecorder
from diloco_node.lab.demo.demo_options import CONTEXT, DemoOptions
from diloco_node.lab.demo.demo_report import build_report, read_merges
from diloco_node.lab.demo.demo_wan import DemoWan, wan_lines
from diloco_node.lab.demo.keeping import RegionKeeper
from diloco_node.lab.demo.live import LiveView
from diloco_node.lab.demo.mix import parse_mix
from diloco_node.lab.demo.region_processes import RegionProcess, free_ports, order_finish, poll_all
from diloco_node.lab.demo.scripted_members import PROGRAM, ScriptedMembers, faults_env
from diloco_node.lab.demo.storm import POLL_S as STORM_POLL_S
from diloco_node.lab.demo.storm import DemoStorm, comparable, storm_lines
from diloco_node.numeric import NS_PER_S
from diloco_node.transport.authority import init_run

NAMES: Final = (
    *("us-east", "us-west", "eu-west", "ap-east", "us-central", "eu-north", "sa-east", "ap-south"),
    *("us-south", "eu-south", "me-west", "af-south", "ap-north", "ca-east", "ca-west", "oc-east"),
)
"""Regions in the order in which a demo takes them."""

REGIONS_DEFAULT: Final = 4

WAN_PORTS: Final = (7400, 7401)
"""Ports of every region in its own network: for the others, and its admin port."""

SYNC_EVERY: Final = 16
"""Inner steps between two rounds of a fragment."""

BATCH: Final = 8
"""Sequences in an inner step, where `--batches` says nothing else."""

EVALUATION: Final = "eval_windows = 256\n"
"""Two runs of the demo are compared to a percent. On 64 windows of as little context they differ by another percent
than on 1,024; on 256 by 0.3 % more or less. A measurement takes 0.25 s, each 20 s."""

STEP_SECONDS: Final = 0.1
"""Inner steps are paced: the learning-rate schedule can be laid out for the time asked for, and regions share a machine
as if each had its own. A step with its share of a round takes 18 ms of CPU time, so four regions need 0.75 cores of
two, and one that starts again slows nobody. `--step-time` leaves room for more regions."""

START_S: Final = 240.0
"""From the first process to the first inner step of every region; the first run on a machine compiles the kernels."""

FINISH_S: Final = 240.0
"""From the order to finish to the last process gone: the last rounds of many regions on few, busy cores."""

TOKENS_MIN_S: Final = 5.0
"""As of `--seconds`: with less, the run may be over before the last region trains."""

POLL_S: Final = 1.0
SLOW_COMPILE_S: Final = 5.0

RUN_TOML: Final = """\
# Written by `diloco-node demo`. The same file serves every region: diloco-node start --region NAME --config THIS
[run]
id = "demo"
seed = {seed}
tokens = {tokens}

state_dir = "."
certs_dir = "certs"

[model]
layers = 2
dim = 64
heads = 4
context = {context}
batch = {batch}
schedule_steps = {schedule_steps}
step_time_min = "{step_ms}ms"
{evaluation}
[rounds]
fragments = 4
sync_every = {sync_every}
overlap_steps = 2

[data]
paths = {data}
"""


def run_demo(options: DemoOptions) -> int:
    """Run it; the exit code. Everything that is made lies in one folder, which the report names."""
    if options.has_outage and options.wan is None:
        raise ConfigError("--outage cuts an emulated WAN: add --wan netem/us-4.toml")
    if not options.has_chaos and (options.mtbf or options.notice):
        raise ConfigError("--mtbf and --notice belong to a storm: add --chaos")
    if options.baseline and not (options.has_chaos or options.script):
        raise ConfigError("--baseline is what a storm or a script is compared with: add --chaos, or --script FILE")
    if options.has_outage and options.tokens:
        raise ConfigError("--outage is laid out for a time: give --seconds, not --tokens")
    if options.budget:
        parse_option("--budget", options.budget, parse_ceiling)
    check_command(options.command)
    if options.command and (options.speeds or options.batches or options.ranks or options.shards):
        raise ConfigError("--speeds, --batches, --ranks and --shard are of the built-in trainer: leave out the command")
    if options.command and options.has_chaos and options.tokens:
        raise ConfigError(
            "a storm of --tokens is laid out for the built-in trainer's pace: give --seconds, or --script"
        )
    missing = [path for path in options.data if not Path(path).exists()]
    if missing:
        raise ConfigError(f"--data {missing[0]} does not exist; give files or folders of text")
    folder = options.folder or Path("runs") / f"demo-{dt.datetime.now().strftime('%Y%m%d-%H%M%S')}"
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"--folder {folder} is not empty; name a new one. The regions of an interrupted demo go on by "
            f"`diloco-node start --config {folder / 'run.toml'} --region NAME`"
        )
    return asyncio.run(Demo(options, folder).run())


class Demo:
    """A demo's steps: prepare, start, watch, finish, report."""

    def __init__(self, options: DemoOptions, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.wan = DemoWan(options) if options.wan is not None else None
        names = NAMES[: options.regions or REGIONS_DEFAULT] if self.wan is None else self.wan.topology.names
        self.names = sorted(names)
        self.mix = parse_mix(options.speeds, options.batches, self.names, ranks=options.ranks, shards=options.shards)
        self.step_s = parse_option("--step-time", options.step_time, _step_seconds)
        self.settings = comparable(options, self.names, step_seconds=self.step_s)
        per_second: float | None = None  # of a user's script nobody knows it
        if not options.command:
            per_second = self.mix.tokens_per_second(self.step_s, len(self.names), batch=BATCH, context=CONTEXT)
        if per_second is not None and 0 < options.tokens < TOKENS_MIN_S * per_second:
            raise ConfigError(
                f"--tokens {options.tokens:,} is less than {TOKENS_MIN_S:.0f} s of training: give at least "
                f"{int(TOKENS_MIN_S * per_second):,}"
            )
        self.storm = (
            DemoStorm(options, self.names, folder, self.settings, tokens_per_second=per_second)
            if options.has_chaos or options.script is not None
            else None
        )
        if self.wan is not None and self.storm is not None and self.storm.plan.joiners:
            raise ConfigError("regions join on this machine only: leave --wan out, or the script's joins")
        self.view = LiveView(f"diloco-node demo: {len(self.names)} regions", is_quiet=options.is_json)
        self.course = CourseRecorder()
        joiners = self.storm.plan.joiners if self.storm is not None else ()
        self.keeper = RegionKeeper(folder, folder / "run.toml", [], self.view.line, joiners, options.command)
        self.regions: list[RegionProcess] = []
        self.members = ScriptedMembers(folder, self.regions, self.keeper, options.data)
        self.tasks: list[asyncio.Task[None]] = []
        self.interrupted = asyncio.Event()

    async def run(self) -> int:
        """Run the demo to its end, an interrupt, or a failure of its own; return the exit code."""
        loop = asyncio.get_running_loop()
        # A session that ends: the regions have sessions of their own, and would train on. nohup ignores it.
        hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
        for number in (signal.SIGINT, signal.SIGTERM, *hangup):
            loop.add_signal_handler(number, self.interrupted.set)
        try:
            if self.wan is not None:
                await self.wan.up(self.folder, self.view.line)
            self.prepare()
            async with dashboard_server(MergedRegions(lambda: targets_in(str(self.folder))), 0) as url:
                self.view.line(f"dashboard {url}")
                await self._train()
        finally:
            try:
                await self.keeper.stop()
            finally:
                if self.wan is not None:
                    await self.wan.down()
        if self.interrupted.is_set():
            sys.stderr.write(f"diloco-node: interrupted; {self._way_on()}\n")
            return INTERRUPTED_CODE
        report = build_report(
            self.folder,
            self.members_now,
            former=sorted({*self.names_ever} - {*self.members_now}),
            wan=self.wan.report() if self.wan is not None else None,
            row_tokens=None if self.options.command else CONTEXT,
        )
        self.add_course(report)
        report["page"] = str((self.folder / PAGE_NAME).resolve())
        (self.folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        write_page(self.folder, self.folder / PAGE_NAME)
        if self.options.is_json:
            sys.stdout.write(json.dumps(report) + "\n")
        else:
            print_report(report)
        is_done = self.storm is None or not self.storm.refusals
        is_whole = report["tokens"]["balanced"] and not (report["data"] or {}).get("faults")
        return 0 if report["equal_digests"] and is_whole and is_done else 1

    @property
    def members_now(self) -> list[str]:
        """The members now, sorted."""
        return sorted(region.name for region in self.regions)

    @property
    def names_ever(self) -> list[str]:
        """All regions that are or were members, sorted."""
        return sorted({*self.names, *(name for name in self.keeper.joiners if (self.folder / name).exists())})

    def add_course(self, report: dict[str, Any]) -> None:
        """Add the work within the time asked for, or that it took, and the storm's part."""
        samples, tokens = self.course.samples, self.options.tokens
        end_ns = story.merged_at_ns(samples, tokens) if tokens else int(self.options.seconds * NS_PER_S)
        merges = read_merges(self.folder, self.members_now, samples)
        final = report["tokens"]["merged"], report["val_loss_global"]
        training = story.training(samples, merges, regions=self.names_ever, end_ns=end_ns, final=final)
        training |= {"settings": self.settings}
        report |= {
            "training": training,
            "chaos": self.storm.document(samples, merges, training) if self.storm is not None else None,
            "outage": None,
        }
        if self.options.has_outage and self.wan is not None:
            report["outage"] = story.outage_document(self.wan.topology.outages[0], samples, merges or ())

    def prepare(self) -> None:
        """Certificates and run.toml; the settings a user would write by hand."""
        self.folder.mkdir(parents=True, exist_ok=True)
        init_run(self.folder / "certs", "demo", self.names)
        ports = free_ports(2 * len(self.names))
        text = RUN_TOML.format(
            seed=self.options.seed,
            tokens=self.options.tokens,
            context=CONTEXT,
            batch=BATCH,
            # 0: as long as the run, which ends by itself.
            schedule_steps=0
            if self.options.tokens
            else max(50, int(self.options.seconds / self.mix.median_step_seconds(self.step_s))),
            step_ms=round(self.step_s * 1000),
            evaluation=EVALUATION,
            sync_every=SYNC_EVERY,
            data=json.dumps([str(Path(path).resolve()) for path in self.options.data]),
        )
        env = faults_env(self.folder)
        for index, name in enumerate(self.names):
            place = self.wan.place(name) if self.wan is not None else None
            host, namespace = (place.address, place.namespace) if place is not None else ("127.0.0.1", "")
            port, admin_port = WAN_PORTS if place is not None else ports[2 * index : 2 * index + 2]
            text += f'\n[regions.{name}]\naddress = "{host}:{port}"\nadmin_port = {admin_port}\n'
            settings = self.mix.settings(self.step_s, index)
            self.regions.append(RegionProcess(name, admin_port, self.folder / name, namespace, PROGRAM, env, settings))
        self.keeper.regions += self.regions
        if self.options.budget:
            text += f'\n[budget]\negress = "{self.options.budget}"\ningress = "{self.options.budget}"\n'
        (self.folder / "run.toml").write_text(text)

    async def _train(self) -> None:
        view = self.view
        view.line(f"folder {self.folder}: run.toml, certificates, one folder per region with its logs")
        await self.compile()
        await self.keeper.start()
        started_s = time.monotonic()
        await self.watch(started_s, until=self._all_step, limit_s=START_S, purpose="to start training")
        trains_s = time.monotonic()
        self.keeper.is_starting = False
        self.course.begin()
        goal = f"{self.options.tokens:,} tokens" if self.options.tokens else f"{self.options.seconds:.0f} s of training"
        view.line(f"all regions train after {trains_s - started_s:.1f} s; {goal}")
        if self.wan is not None:
            await self.wan.start_timetable()
        async with self._stormy():
            await self.watch(trains_s, until=lambda: self.is_trained(trains_s), limit_s=None)
        if not self.interrupted.is_set():
            await self.finish(trains_s)

    def _way_on(self) -> str:
        """Say where an interrupted demo lies, and how its regions go on."""
        if self.wan is not None or not (self.folder / "run.toml").exists():
            return f"what there is lies in {self.folder}"
        command = f" -- {shlex.join(self.options.command)}" if self.options.command else ""
        return (
            f"what there is lies in {self.folder}. To go on, for each region: "
            f"diloco-node start --config {self.folder / 'run.toml'} --region NAME{command}"
        )

    def is_trained(self, trains_s: float) -> bool:
        """The time is over and orders are done; or so much is merged that a storm must end: the run ends by itself."""
        if not self.options.tokens:
            has_orders = self.storm is not None and self.storm.has_open_orders
            return time.monotonic() - trains_s >= self.options.seconds and not has_orders
        self._check_learners(all)
        # An operator may have ended it before.
        calm = self.storm.calm_tokens if self.storm is not None else 0
        return self.keeper.is_over or self.course.samples[-1].most("tokens_merged") >= self.options.tokens - calm

    async def finish(self, trains_s: float) -> None:
        """Order the run's end, unless it comes by itself, and watch until every region has exited."""
        ending_s = time.monotonic()
        if self.options.tokens:
            self.view.line("the run ends by itself: one last round per fragment, then the final model")
        else:
            self.view.line("finishing: one last round per fragment, then the final model")
            with contextlib.suppress(TimeoutError):  # the limit below says more
                await order_finish(self.regions, limit_s=FINISH_S, is_given_up=self._is_given_up)
        limit_s = ending_s - trains_s + FINISH_S
        await self.watch(trains_s, until=lambda: self.keeper.is_over, limit_s=limit_s, purpose="to finish")

    def _is_given_up(self) -> bool:
        return self.interrupted.is_set() or bool(self.keeper.end_reasons.keys() - self.keeper.leaving)

    @contextlib.asynccontextmanager
    async def _stormy(self) -> AsyncIterator[None]:
        """The training with its storm beside it."""
        if self.storm is None:
            yield
            return
        storm = self.storm.run(self.regions, self.course.now_ns, self.view.line, self.members.carry_out)
        async with self.beside(storm, "storm"):
            yield

    @contextlib.asynccontextmanager
    async def beside(self, work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
        """Something that goes on beside the training, and ends with it; `watch` raises what it raises."""
        task = asyncio.create_task(work, name=name)
        self.tasks.append(task)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])
        _check(task)

    async def compile(self) -> None:
        """Compile the kernels once, before every region does it at the same time; milliseconds when they are cached."""
        started_s = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "from diloco_node.codec.kernels import warm_up; warm_up()"
        )
        if await process.wait() != 0:
            raise DilocoError("the codec's kernels could not be compiled; what numba said is above")
        seconds = time.monotonic() - started_s
        if seconds > SLOW_COMPILE_S:
            self.view.line(f"compiled the codec's kernels in {seconds:.0f} s (cached for the next time)")

    async def watch(self, started_s: float, *, until: Any, limit_s: float | None, purpose: str = "") -> None:
        """Poll and draw until something is so.

        Raises DilocoError: a region ended too early, the limit is reached, or what goes on beside the training failed.
        """
        # The time that it takes to merge so many tokens is compared with a storm's.
        is_calm = self.storm is None and not self.options.tokens and not self.options.has_outage
        poll_s = POLL_S if is_calm else STORM_POLL_S
        while not self.interrupted.is_set() and not until():
            elapsed_s = time.monotonic() - started_s
            if limit_s is not None and elapsed_s > limit_s:
                ends = (f"--- {region.name}\n{region.last_lines(4)}" for region in self.regions)
                raise DilocoError("\n".join((f"the regions took more than {limit_s:.0f} s {purpose}:", *ends)))
            self.keeper.check()
            for task in self.tasks:
                _check(task)
            await poll_all(self.regions, wait_s=poll_s)
            self.course.take(self.regions)
            self.view.show(elapsed_s, [region_cells(region.name, region.status) for region in self.regions])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.interrupted.wait(), poll_s)

    def _all_step(self) -> bool:
        """Whether each region trains. Raises DilocoError: a learner has ended for good."""
        self._check_learners(any)
        return all((region.status.get("learner") or {}).get("step", 0) > 0 for region in self.regions)

    def _check_learners(self, are_missed: Callable[[Iterable[bool]], bool]) -> None:
        """Raise DilocoError where any, or all, of the learners have ended for good before the run."""
        ends = [
            (region.status.get("learner_process") or {}).get("state") in ("stopped", "done")
            and region.status.get("state") not in ("finishing", "finished")
            for region in self.regions
        ]
        if ends and are_missed(ends):
            region = self.regions[ends.index(True)]
            raise DilocoError(
                f"{region.name}: its learner trains no more, before the run's end:\n{region.last_lines()}"
            )


def _step_seconds(text: str) -> float:
    """Seconds of a step; "" for the usual ones. Raises ValueError: no duration, or too short or long a one."""
    seconds = parse_duration(text).ns / NS_PER_S if text else STEP_SECONDS
    if not STEP_SECONDS / 10 <= seconds <= 100 * STEP_SECONDS:
        raise ValueError("use 10 ms to 10 s")
    return seconds


def _check(task: asyncio.Task[None]) -> None:
    """Raise what it has raised."""
    if task.done() and not task.cancelled() and (error := task.exception()) is not None:
        raise error


def print_report(report: dict[str, Any]) -> None:
    """The report for people."""
    figures = ("steps", "tokens", "loss first", "last", "held-out", "participation", "sent", "received")
    rows = [
        (
            region["name"],
            f"{region['inner_steps']}",
            f"{region['tokens']:,}",
            *(_loss(region[key]) for key in ("loss_first", "loss_last", "val_loss")),
            "-" if region["participation"] is None else f"{region['participation']:.1%}",  # of no round
            *(human_bytes(region[f"wire_bytes_{way}"]) for way in ("out", "in")),
        )
        for region in report["regions"]
    ]
    table = table_lines([("region", "left"), *((name, "right") for name in figures)], rows)
    sys.stdout.write("\n".join(["What each region did", *table, *report_lines(report)]) + "\n")


def report_lines(report: dict[str, Any]) -> list[str]:
    """The facts below the report's table, each in a line."""
    tokens = report["tokens"]
    same = "the same bytes in every region" if report["equal_digests"] else "DIFFERENT between regions"
    whole = "accounts for every one" if tokens["balanced"] else f"FAULTS: {'; '.join(tokens['faults'])}"
    rounds, in_flight = report["rounds_committed"], report["rounds_in_flight_max"]
    sums = f"{tokens['merged']:,} merged + {tokens['carried']:,} carried + {tokens['discarded']:,} discarded"
    return [
        f"final parameters   {same}",
        f"held-out loss      {_loss(report['val_loss_global'])} of the merged model",
        f"rounds             {rounds} committed, at most {in_flight} in flight",
        f"tokens             {tokens['trained']:,} trained = {sums}; the ledger {whole}",
        *(
            f"                   {learner['learner']} lost its folder, and with it the count of incarnation "
            f"{learner['incarnation']}: what that trained since its last merge is in none of these"
            for learner in tokens["uncounted"]
        ),
        f"data               {_data_text(report['data'])}",
        f"learners blocked   {report['learner_blocked_seconds']:.2f} s in all, over all regions",
        *(wan_lines(report) if report["wan"] is not None else ()),
        *(storm_lines(report) if report["chaos"] is not None else ()),
        f"folder             {report['folder']}",
        f"page               {report['page']}",
    ]


def _data_text(data: dict[str, Any] | None) -> str:
    if data is None:
        return "not counted: the ledger is summed up"
    if not data["rows"] and not data["faults"]:
        return "not counted: the script has no ShardLoader"
    faults = f"; FAULTS: {'; '.join(data['faults'])}" if data["faults"] else ""
    return f"{data['rows']:,} rows, {data['unmerged']:,} of them in no merge, {data['twice']} merged twice{faults}"


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

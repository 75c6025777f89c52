"""lab/demo/demo_run.py: what a demo does when something goes wrong beside the training."""

import asyncio
import re
import tomllib
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_node.errors import ConfigError, DilocoError, StorageError
from diloco_node.lab.chaos.demo_processes import DemoFile
from diloco_node.lab.chaos.fault_files import FAULTS_VARIABLE
from diloco_node.lab.chaos.fault_plan import ORDERS
from diloco_node.lab.chaos.story import RegionSample, RunSample
from diloco_node.lab.cli import demo as command_module
from diloco_node.lab.demo import demo_run as run_module
from diloco_node.lab.demo import faulty_region as demo_region
from diloco_node.lab.demo.demo_options import DemoOptions
from diloco_node.lab.demo.demo_run import Demo, run_demo
from diloco_node.numeric import NS_PER_S
from diloco_node.unix_sockets import Process

NOBODY = Process(2, 1, "")
ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    return Demo(DemoOptions(regions=2, seconds=5, is_json=True), tmp_path / "run")


@pytest.mark.parametrize("name", ["grow_and_shrink", "ten_regions", "two_sites"])
def test_each_command_in_an_examples_script_gives_all_of_its_orders(name: str, tmp_path: Path) -> None:
    """A demo refuses one that ends before the last order."""
    script = EXAMPLES / f"{name}.jsonl"
    commands = [line for line in script.read_text().splitlines() if line.startswith("# diloco-node demo ")]
    assert commands
    for command in commands:
        words = dict(re.findall(r"--([a-z-]+) (\S+)", command))
        options = DemoOptions(
            regions=int(words.get("regions", 0)) or None,
            seconds=float(words.get("seconds", 90)),
            tokens=int(words.get("tokens", 0)),
            step_time=words.get("step-time", ""),
            has_chaos="--chaos" in command,
            script=script,
        )
        storm = Demo(options, tmp_path / "run").storm
        assert storm is not None
        orders = [fault for fault in storm.plan.faults if fault.kind in ORDERS]
        assert len(orders) == sum(
            f'"do": "{kind}"' in line for line in script.read_text().splitlines() for kind in ORDERS
        )


def test_a_script_beside_a_users_command_is_carried_out_whole() -> None:
    """Nobody knows the command's pace, so nobody knows when its tokens are trained."""
    script = EXAMPLES / "real_run.jsonl"
    command = next(line for line in script.read_text().splitlines() if line.startswith("# diloco-node demo "))
    words, _, learner = command.partition(" -- ")
    tokens = int(words.split("--tokens ")[1].split()[0])
    options = DemoOptions(tokens=tokens, wan=ROOT / "netem" / "us-4.toml", script=script, command=(learner,))
    storm = Demo(options, ROOT / "nowhere").storm
    assert storm is not None
    assert len(storm.plan.faults) == sum(line.startswith("{") for line in script.read_text().splitlines()) == 13
    assert storm.calm_tokens == 0


async def test_the_wan_is_removed_also_when_a_region_can_not_be_stopped(demo: Demo) -> None:
    done: list[str] = []

    async def up(_: object) -> None:
        raise DilocoError("no namespaces")

    async def stop() -> None:
        raise DilocoError("it does not end")

    async def down() -> None:
        done.append("down")

    demo.wan = SimpleNamespace(up=up, down=down)  # type: ignore[assignment]
    demo.keeper = SimpleNamespace(stop=stop)  # type: ignore[assignment]
    with pytest.raises(DilocoError, match="it does not end"):
        await demo.run()
    assert done == ["down"]


async def test_what_fails_beside_the_training_ends_the_demo_at_once(
    demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after hours, when the training is over."""

    async def fail() -> None:
        raise StorageError("the folder is full")

    async def no_answer(_: object, *, wait_s: float) -> None:
        await asyncio.sleep(0)

    demo.keeper = SimpleNamespace(check=lambda: None)  # type: ignore[assignment]
    monkeypatch.setattr(run_module, "POLL_S", 0.001)
    monkeypatch.setattr(run_module, "poll_all", no_answer)
    with pytest.raises(StorageError, match="the folder is full"):
        async with asyncio.timeout(60), demo.beside(fail(), "storm"):
            await demo.watch(0.0, until=lambda: False, limit_s=None)


async def test_what_failed_beside_the_training_is_raised_also_after_its_end(demo: Demo) -> None:
    async def fail() -> None:
        raise StorageError("the folder is full")

    with pytest.raises(StorageError, match="the folder is full"):
        async with demo.beside(fail(), "storm"):
            await asyncio.sleep(0)


async def test_what_goes_on_beside_the_training_ends_with_it(demo: Demo) -> None:
    async with demo.beside(asyncio.sleep(600), "storm"):  # type: ignore[arg-type]
        await asyncio.sleep(0)
    assert [task.cancelled() for task in demo.tasks] == [True]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (DemoOptions(command=("pythn", "x.py")), "'pythn' is not found"),
        (DemoOptions(command=("python", "nowhere.py")), "'nowhere.py' is not found"),
        (DemoOptions(command=("true",), batches="8,8,8,8"), "are of the built-in trainer"),
        (DemoOptions(command=("true",), has_chaos=True, tokens=1_000_000), "give --seconds, or --script"),
    ],
)
def test_a_command_that_no_demo_can_run_is_refused_before_the_first_file(
    options: DemoOptions, text: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=text):
        run_demo(replace(options, folder=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("states", "is_run_over", "is_raised"),
    [
        (("done", "running"), False, False),
        (("done", "stopped"), False, True),
        (("done", "done"), True, False),
    ],
)
def test_a_demo_whose_scripts_have_all_ended_before_its_tokens_ends_too(
    tmp_path: Path, states: tuple[str, ...], is_run_over: bool, is_raised: bool
) -> None:
    demo = Demo(DemoOptions(regions=2, tokens=1_000_000, command=("true",)), tmp_path / "run")
    demo.prepare()
    demo.course.begin()
    for region, state in zip(demo.regions, states, strict=True):
        region.status = {"learner_process": {"state": state}, "state": "finished" if is_run_over else "training"}
    demo.course.take(demo.regions)
    raises = pytest.raises(DilocoError, match="us-east: its learner trains no more") if is_raised else nullcontext()
    with raises:
        assert not demo.is_trained(0.0)


def test_a_learner_that_never_starts_ends_the_demo_with_its_last_lines(demo: Demo) -> None:
    demo.prepare()
    assert demo._all_step() is False
    log = demo.folder / "us-west" / "logs" / "start.log"
    log.parent.mkdir(parents=True)
    log.write_text("ModuleNotFoundError: No module named 'torch'\n")
    demo.regions[1].status = {"learner_process": {"state": "stopped"}}
    with pytest.raises(
        DilocoError, match="us-west: its learner trains no more, before the run's end:\nModuleNotFoundError"
    ):
        demo._all_step()


def test_every_region_of_a_demo_looks_for_faults_in_its_folder(demo: Demo) -> None:
    demo.prepare()
    assert [region.name for region in demo.regions] == demo.names
    for region in demo.regions:
        assert region.program == ("-m", demo_region.__name__)
        assert region.env == {FAULTS_VARIABLE: str(DemoFile(demo.folder, NOBODY).faults.resolve())}


@pytest.mark.parametrize(("ended", "is_given_up"), [({}, False), ({"c": ""}, False), ({"a": "", "c": ""}, True)])
def test_a_region_that_has_left_does_not_end_the_run(demo: Demo, ended: dict[str, str], is_given_up: bool) -> None:
    demo.keeper = SimpleNamespace(end_reasons=ended, leaving={"c"})  # type: ignore[assignment]
    assert demo._is_given_up() is is_given_up


def test_the_training_goes_on_until_orders_are_done(demo: Demo) -> None:
    demo.storm = SimpleNamespace(has_open_orders=True)  # type: ignore[assignment]
    assert not demo.is_trained(0.0)
    demo.storm = SimpleNamespace(has_open_orders=False)  # type: ignore[assignment]
    assert demo.is_trained(0.0)


def with_tokens(folder: Path, *, merged: int, is_over: bool = False, **more: object) -> Demo:
    """A demo of 400,000 tokens of which so many are merged."""
    options = DemoOptions(regions=2, tokens=400_000, is_json=True, **more)  # type: ignore[arg-type]
    demo = Demo(options, folder / "run")
    demo.keeper = SimpleNamespace(is_over=is_over, joiners=())  # type: ignore[assignment]
    demo.course.samples = [RunSample(1, {"a": RegionSample(True, True, tokens_merged=merged)})]
    return demo


@pytest.mark.parametrize(
    ("merged", "has_chaos", "is_over", "is_trained"),
    [
        (399_999, False, False, False),
        (400_000, False, False, True),
        (297_599, True, False, False),
        (297_600, True, False, True),  # two regions train 10,240 tokens a second, and the last ten are calm
        (10, False, True, True),  # an operator ended it
    ],
)
def test_a_demo_of_tokens_trains_until_they_are_merged_or_a_storm_must_end(
    merged: int, has_chaos: bool, is_over: bool, is_trained: bool, tmp_path: Path
) -> None:
    demo = with_tokens(tmp_path, merged=merged, is_over=is_over, has_chaos=has_chaos)
    assert demo.is_trained(0.0) is is_trained


async def test_an_interrupt_before_the_first_sample_ends_the_watch(tmp_path: Path) -> None:
    demo = with_tokens(tmp_path, merged=0)
    demo.course.samples = []
    demo.interrupted.set()
    await demo.watch(0.0, until=lambda: demo.is_trained(0.0), limit_s=None)


async def test_the_end_of_a_demo_of_tokens_is_not_ordered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def order(*_: object, **__: object) -> None:
        pytest.fail("the run ends by itself")

    monkeypatch.setattr(run_module, "order_finish", order)
    await with_tokens(tmp_path, merged=400_000, is_over=True).finish(0.0)


def test_a_demo_of_tokens_lays_its_schedule_out_for_them(tmp_path: Path) -> None:
    """The length of the schedule is the run's then, and that of the time otherwise."""
    found = []
    for name, options in (("tokens", DemoOptions(tokens=400_000)), ("seconds", DemoOptions(seconds=30))):
        demo = Demo(options, tmp_path / name)
        demo.prepare()
        document = tomllib.loads((tmp_path / name / "run.toml").read_text())
        found.append((document["run"]["tokens"], document["model"]["schedule_steps"]))
    assert found == [(400_000, 0), (0, 300)]


def test_too_few_tokens_and_an_outage_of_them_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 102,400"):
        Demo(DemoOptions(tokens=102_399), tmp_path)
    with pytest.raises(ConfigError, match="give --seconds"):
        run_module.run_demo(DemoOptions(tokens=400_000, wan=tmp_path, has_outage=True))
    with pytest.raises(ConfigError, match="give one of them"):
        command_module.demo(seconds=5.0, tokens=400_000)


def test_the_window_of_a_demo_of_tokens_ends_when_they_are_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "read_merges", lambda *_: None)
    demo = with_tokens(tmp_path, merged=0)
    demo.course.samples = [
        RunSample(at_s * NS_PER_S, {"a": RegionSample(True, True, tokens_merged=merged)})
        for at_s, merged in ((10, 200_000), (25, 410_000), (30, 415_000))
    ]
    report = {"tokens": {"merged": 415_000}, "val_loss_global": 2.0}
    demo.add_course(report)
    training: dict[str, Any] = report["training"]  # type: ignore[assignment]
    assert (training["seconds"], training["tokens_merged"]) == (25, 410_000)


def test_each_fact_of_the_report_stays_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    tokens = {"trained": 3_008_000, "merged": 2_980_273, "carried": 27_727, "discarded": 0}
    report = {
        "regions": [],
        "rounds_committed": 9,
        "rounds_in_flight_max": 2,
        "learner_blocked_seconds": 0.5,
        "tokens": {**tokens, "balanced": True, "faults": [], "uncounted": []},
        "data": {"rows": 47_000, "merged": 46_567, "unmerged": 433, "twice": 0, "faults": []},
        "equal_digests": True,
        "val_loss_global": 1.5,
        **dict.fromkeys(("wan", "budget", "chaos")),
        "folder": "runs/[1]",
        "page": "p" * 200,
    }
    run_module.print_report(report)
    lines = capsys.readouterr().out.splitlines()
    assert (
        "tokens             3,008,000 trained = 2,980,273 merged + 27,727 carried + 0 discarded; the ledger "
        in lines[5]
    )
    assert lines[5].endswith("accounts for every one")
    assert lines[-2:] == ["folder             runs/[1]", f"page               {'p' * 200}"]


def test_the_step_time_is_that_of_the_file_and_of_a_baseline(tmp_path: Path) -> None:
    demo = Demo(DemoOptions(step_time="400ms"), tmp_path / "run")
    demo.prepare()
    assert 'step_time_min = "400ms"' in (tmp_path / "run" / "run.toml").read_text()
    assert demo.settings["step_seconds"] == 0.4


@pytest.mark.parametrize("text", ["0ms", "9ms", "11s", "400"])
def test_a_step_time_that_can_not_be_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=f"--step-time is '{text}'"):
        Demo(DemoOptions(step_time=text), tmp_path / "run")

"""lab/demo/storm.py: what a storm asks for and refuses, and what it reports."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from diloco_node.errors import ConfigError, StorageError
from diloco_node.lab.chaos.executor import StruckFault
from diloco_node.lab.chaos.fault_plan import FaultTarget, PlannedFault
from diloco_node.lab.chaos.story import MergeMember, RegionSample, RunSample, TimedMerge, training
from diloco_node.lab.demo import storm as storm_module
from diloco_node.lab.demo.demo_options import DemoOptions
from diloco_node.lab.demo.demo_run import run_demo
from diloco_node.lab.demo.storm import (
    CALM_S,
    SCRIPT_NAME,
    DemoStorm,
    comparable,
    read_baseline,
    storm_lines,
)
from diloco_node.numeric import NS_PER_S

S = NS_PER_S
NAMES = ("b", "a", "c")
OPTIONS = DemoOptions(seconds=60, seed=4, has_chaos=True)
RATE = 1000.0
SETTINGS = comparable(OPTIONS, NAMES, step_seconds=0.1)


def storm_of(options: DemoOptions, folder: Path, *, names: Sequence[str] = NAMES) -> DemoStorm:
    settings = comparable(replace(options, baseline=None), NAMES, step_seconds=0.1)
    return DemoStorm(options, names, folder, settings, tokens_per_second=RATE)


def baseline(folder: Path, *, chaos: object = None, **settings: Any) -> Path:
    """The report of an undisturbed demo with these settings changed."""
    training = {
        "seconds": 60,
        "tokens_merged": 2000,
        "tokens_merged_of": {"a": 1000, "b": 500, "c": 500},
        "final": {"tokens": 2100, "val_loss": 1.9},
        "settings": {**SETTINGS, **settings},
    }
    path = folder / "undisturbed.json"
    path.write_text(json.dumps({"training": training, "chaos": chaos}))
    return path


def test_the_end_of_the_training_is_calm(tmp_path: Path) -> None:
    plan = storm_of(replace(OPTIONS, mtbf="500ms"), tmp_path).plan
    assert len(plan.faults) > 50
    assert plan.faults[-1].at_ns < (60 - CALM_S) * S
    assert {fault.target.region for fault in plan.faults} == set(NAMES)
    assert storm_of(replace(OPTIONS, mtbf="500ms"), tmp_path, names=sorted(NAMES)).plan == plan
    assert storm_of(replace(OPTIONS, mtbf="500ms", seed=5), tmp_path).plan != plan


def test_a_storm_that_ends_with_a_number_of_tokens_is_drawn_for_longer_than_they_take(tmp_path: Path) -> None:
    by_tokens = storm_of(replace(OPTIONS, tokens=60_000), tmp_path)
    assert by_tokens.calm_tokens == CALM_S * RATE
    assert 270 * S < by_tokens.plan.faults[-1].at_ns < 300 * S
    by_time = storm_of(OPTIONS, tmp_path)
    assert by_tokens.plan.faults[: len(by_time.plan.faults)] == by_time.plan.faults


def test_a_script_alone_is_all_that_is_struck_and_with_a_storm_it_is_a_part(tmp_path: Path) -> None:
    file = tmp_path / "script"
    file.write_text(
        '{"at_seconds": 9, "do": "join", "target": "d"}\n{"at_seconds": 20, "do": "leave", "target": "a"}\n'
    )
    alone = storm_of(replace(OPTIONS, has_chaos=False, script=file), tmp_path)
    assert [(str(fault.target), fault.kind) for fault in alone.plan.faults] == [("d", "join"), ("a", "leave")]
    both = storm_of(replace(OPTIONS, script=file, mtbf="500ms"), tmp_path).plan.faults
    assert list(both) == sorted(both, key=lambda fault: fault.at_ns)
    assert set(alone.plan.faults) < set(both)
    kills = [fault for fault in both if fault.kind == "kill"]
    assert {fault.target.region for fault in kills if fault.at_ns > 20 * S} == {"b", "c", "d"}


def test_the_report_says_what_became_of_each_order(tmp_path: Path) -> None:
    file = tmp_path / "script"
    file.write_text('{"at_seconds": 10, "do": "join", "target": "d"}\n')
    storm = storm_of(replace(OPTIONS, has_chaos=False, script=file), tmp_path)
    join, leave = (PlannedFault(10 * S, kind, FaultTarget(name)) for kind, name in (("join", "d"), ("leave", "a")))
    storm._strikes = [
        StruckFault(10 * S, join, (), stopped_ns=4 * S),
        StruckFault(20 * S, leave, (), stopped_ns=60 * S, refusal="3 voters are needed"),
    ]
    assert storm.refusals == ["leave a: 3 voters are needed"]
    assert not storm.has_open_orders
    up = RegionSample(True, True, incarnation=1)
    samples = [RunSample(-1, dict.fromkeys("abc", up)), RunSample(15 * S, dict.fromkeys("abcd", up))]
    merges = [TimedMerge(20 * S, {name: MergeMember(1, 1, 200.0) for name in "abcd"})]
    done = training(samples, merges, regions="abcd", end_ns=60 * S, final=(600, 2.5))
    chaos = storm.document(samples, merges, done)
    assert (chaos["struck"], chaos["missed"], chaos["seed"], chaos["mtbf_seconds"]) == ({}, 0, None, None)
    assert chaos["seconds_of"]["d"]["no member"] == 15.0
    text = "\n".join(storm_lines({"training": done, "chaos": chaos}))
    assert "at 10.0            join d: done after 4.0 s" in text
    assert "at 20.0            leave a: REFUSED: 3 voters are needed" in text
    storm._strikes = []
    text = "\n".join(storm_lines({"training": done, "chaos": storm.document(samples, merges, done)}))
    assert "at 10.0            join d: REFUSED: the training ended before its time" in text


def test_a_script_is_cut_where_the_calm_begins(tmp_path: Path) -> None:
    file = tmp_path / "script"
    file.write_text(
        '{"at_seconds": 48, "do": "pause", "target": "a", "seconds": 30}\n'
        '{"at_seconds": 55, "do": "kill", "target": "a"}\n'
    )
    [fault] = storm_of(replace(OPTIONS, has_chaos=False, script=file), tmp_path).plan.faults
    assert fault == PlannedFault(48 * S, "pause", FaultTarget("a"), 2 * S)


def test_a_demo_that_ends_by_tokens_takes_the_orders_that_are_given_before_and_refuses_others(tmp_path: Path) -> None:
    file = tmp_path / "script"
    join = '{"at_seconds": 5, "do": "join", "target": "d"}\n'
    for at_s, is_sure in ((30, True), (45, False), (400, False)):
        file.write_text(join + f'{{"at_seconds": {at_s}, "do": "leave", "target": "a"}}\n')
        options = replace(OPTIONS, has_chaos=False, script=file, tokens=60_000)  # 5 s with three, the rest with four
        if is_sure:
            storm = storm_of(options, tmp_path)
            late = "the training ended before its time"
            assert storm.refusals == [f"join d: {late}", f"leave a: {late}"], "none was given yet"
            continue
        with pytest.raises(ConfigError, match=rf"leave a at {at_s} s would never be given.*38.75 s on.*more --tokens"):
            storm_of(options, tmp_path)


def test_an_order_that_would_never_be_given_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "script"
    file.write_text('{"at_seconds": 55, "do": "leave", "target": "a"}\n')
    with pytest.raises(ConfigError, match="leave a at 55 s would never be given: the demo is calm from 50 s on"):
        storm_of(replace(OPTIONS, has_chaos=False, script=file), tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"seconds": CALM_S}, "--seconds"),
        ({"tokens": 10_000}, "10,000 tokens"),
        ({"mtbf": "often"}, "--mtbf"),
        ({"mtbf": "0s"}, "above zero"),
        ({"mtbf": "1us"}, "longer mean time"),
        ({"notice": "soon"}, "--notice"),
        ({"script": Path("missing")}, "can't be read"),
        ({"baseline": Path("missing")}, "--baseline"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=reason):
        storm_of(replace(OPTIONS, **changes), tmp_path)


UNCOMPARED = (
    *("regions", "folder", "is_json", "has_chaos", "mtbf", "notice", "script", "baseline"),
    "step_time",
)
"""Their values may differ: names of regions and seconds of a step are compared, and the others change no figure."""

OTHER_VALUES: dict[str, Any] = {
    "seconds": 61, "tokens": 50_000, "data": ("/text",), "seed": 5, "wan": Path("/us-4.toml"),
    "has_outage": True, "budget": "1Mbit/s", "speeds": "1,2,2", "batches": "8,8,4", "ranks": "2,1,1",
    "shards": "fsdp,none,none", "command": ("python", "loop.py"),
}  # fmt: skip
"""Another value of each option that is compared."""


def test_each_option_is_compared_or_named_as_one_that_is_not() -> None:
    """From the options that there are: the next one can't be forgotten."""
    assert {one.name for one in fields(DemoOptions)} == {*OTHER_VALUES, *UNCOMPARED}


@pytest.mark.parametrize("changes", [{name: value} for name, value in OTHER_VALUES.items()], ids=list(OTHER_VALUES))
def test_a_baseline_of_another_demo_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    [name] = changes
    made = baseline(tmp_path, **comparable(replace(OPTIONS, **changes), NAMES, step_seconds=0.1))
    with pytest.raises(ConfigError, match=f"another demo: {name} is"):
        storm_of(replace(OPTIONS, baseline=made), tmp_path)


@pytest.mark.parametrize(("name", "names", "step_seconds"), [("regions", "ab", 0.1), ("step_seconds", "abc", 0.05)])
def test_a_baseline_of_other_regions_or_steps_is_refused(
    name: str, names: str, step_seconds: float, tmp_path: Path
) -> None:
    made = baseline(tmp_path, **comparable(OPTIONS, names, step_seconds=step_seconds))
    with pytest.raises(ConfigError, match=f"another demo: {name} is"):
        storm_of(replace(OPTIONS, baseline=made), tmp_path)


def test_a_baseline_of_the_same_demo_is_taken(tmp_path: Path) -> None:
    """Kept elsewhere, shown otherwise, and without the storm."""
    changes = {"regions": 3, "folder": tmp_path, "is_json": True, "has_chaos": False}
    made = baseline(tmp_path, **comparable(replace(OPTIONS, **changes), sorted(NAMES), step_seconds=0.1))
    storm_of(replace(OPTIONS, baseline=made, mtbf="2s"), tmp_path)


def test_a_storm_is_no_baseline(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is of a storm"):
        read_baseline(baseline(tmp_path, chaos={"struck": {"kill": {"daemon": 1}}}), SETTINGS)


def test_a_baseline_with_other_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"step_seconds is 0\.1 there and 0\.4 here"):
        read_baseline(baseline(tmp_path), comparable(OPTIONS, NAMES, step_seconds=0.4))


def test_a_script_that_strikes_nothing_is_a_baseline(tmp_path: Path) -> None:
    """Regions come and go in both runs: the faults make the difference."""
    assert read_baseline(baseline(tmp_path, chaos={"struck": {}}), SETTINGS)["seconds"] == 60


def test_a_baseline_that_is_no_report_is_refused(tmp_path: Path) -> None:
    for text in ("", "[]", "{}", '{"training": null}', '{"training": {"settings": {}}, "chaos": null}'):
        (tmp_path / "file").write_text(text)
        with pytest.raises(ConfigError, match=r"report\.json"):
            storm_of(replace(OPTIONS, baseline=tmp_path / "file"), tmp_path)


@pytest.mark.parametrize("changes", [{"baseline": Path("x")}, {"mtbf": "5s"}, {"notice": "9s"}])
def test_options_of_a_storm_want_a_storm(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="add --chaos"):
        run_demo(DemoOptions(**changes))


def test_the_plan_is_left_as_a_script_that_makes_the_same_storm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def spare(*_: object) -> None:
        pass

    monkeypatch.setattr(storm_module.FaultExecutor, "strike", spare)
    drawn = storm_of(OPTIONS, tmp_path)
    asyncio.run(drawn.run([], lambda: 60 * S, lambda _: None))
    again = storm_of(replace(OPTIONS, has_chaos=False, script=tmp_path / SCRIPT_NAME), tmp_path)
    assert again.plan == drawn.plan
    assert len(again.plan.faults) > 3


def test_what_goes_wrong_with_a_fault_is_one_plain_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise StorageError("the folder is full")

    monkeypatch.setattr(storm_module.FaultExecutor, "strike", refuse)
    (tmp_path / "script").write_text('{"at_seconds": 0, "do": "kill", "target": "a"}\n')
    storm = storm_of(replace(OPTIONS, has_chaos=False, script=tmp_path / "script"), tmp_path)
    with pytest.raises(StorageError, match="the folder is full"):
        asyncio.run(storm.run([], lambda: 0, lambda _: None))


def test_the_report_says_what_was_struck_and_what_it_cost(tmp_path: Path) -> None:
    storm = storm_of(replace(OPTIONS, baseline=baseline(tmp_path)), tmp_path)
    target = FaultTarget("a", "learner")
    storm._strikes = [
        StruckFault(10 * S, PlannedFault(10 * S, "kill", target), (77,)),
        StruckFault(20 * S, PlannedFault(20 * S, "kill", FaultTarget("b")), ()),
        StruckFault(30 * S, PlannedFault(30 * S, "pause", FaultTarget("c"), 2 * S), (78, 79)),
    ]
    up = RegionSample(True, True, incarnation=1)
    dead = RegionSample(True, False, incarnation=1)
    back = RegionSample(True, True, incarnation=2, tokens_merged=1500, rounds=30)
    samples = [
        RunSample(-1, {"a": up, "b": up, "c": up}),
        RunSample(10 * S, {"a": dead, "b": up, "c": up}),
        RunSample(15 * S, {"a": back, "b": up, "c": up}),
    ]
    merges = [
        TimedMerge(S, {name: MergeMember(1, 1, 200.0) for name in "abc"}),
        TimedMerge(16 * S, {"a": MergeMember(2, 1, 300.0)}),
    ]
    done = training(samples, merges, regions=NAMES, end_ns=60 * S, final=(1600, 2.5))
    chaos = storm.document(samples, merges, done)
    assert chaos["struck"] == {"kill": {"learner": 1}, "pause": {"region": 1}}
    assert (chaos["missed"], chaos["seed"], chaos["mtbf_seconds"], chaos["calm_seconds"]) == (1, 4, 5.0, CALM_S)
    assert chaos["rejoin"]["learner"]["seconds_median"] == 6.0
    # Three samples only: the first lasts until it dies, the last until the end.
    spent = {"training": 10.0, "training without its daemon": 0.0, "catching up": 45.0, "stopped": 0.0, "dead": 5.0}
    spent |= {"no member": 0.0}
    assert chaos["seconds_of"]["a"] == spent
    assert chaos["compared"]["goodput"] == 0.75
    assert chaos["compared"]["goodput_of"] == {"a": 0.5, "b": 0.4, "c": 0.4}
    assert chaos["compared"]["loss"] is None, "both runs end by the clock"
    report = json.loads(json.dumps({"training": done, "chaos": chaos}))
    text = "\n".join(storm_lines(report))
    for part in ("kill 1 learner; pause 1 region", "1 met nobody", "goodput            75.0%", "median 6.0 s", "50.0%"):
        assert part in text, text


def test_the_report_of_a_storm_of_notices_says_how_machines_took_them(tmp_path: Path) -> None:
    storm = storm_of(replace(OPTIONS, notice="30s", baseline=baseline(tmp_path)), tmp_path)
    notice = PlannedFault(10 * S, "notice", FaultTarget("a"), 30 * S)
    storm._strikes = [
        StruckFault(10 * S, notice, (77,), stopped_ns=3 * S),
        StruckFault(20 * S, notice, (78,), stopped_ns=31 * S, kills=2),
        StruckFault(25 * S, notice, ()),
    ]
    up, dead = RegionSample(True, True, incarnation=1), RegionSample(True, False, incarnation=1)
    later = replace(up, tokens_merged=1500)
    samples = [RunSample(-1, dict.fromkeys("abc", up)), RunSample(45 * S, {"a": dead, "b": later, "c": later})]
    merges = [TimedMerge(S, {name: MergeMember(1, 1, 200.0) for name in "abc"})]
    done = training(samples, merges, regions=NAMES, end_ns=60 * S, final=(600, 2.5))
    chaos = storm.document(samples, merges, done)
    assert chaos["notices"] == {"count": 2, "stopped_seconds_most": 31.0, "killed": 1}
    assert (chaos["notice_seconds"], chaos["seconds_of"]["a"]["dead"]) == (30.0, 15.0)
    assert chaos["goodput_there"] > chaos["compared"]["goodput"] > 0
    text = "\n".join(storm_lines({"training": done, "chaos": chaos}))
    for words in ("a notice of 30 s per 5 s", "2 machines stopped within 31.0 s; 1 had to be killed", "were there"):
        assert words in text, text


def test_runs_of_as_many_tokens_are_compared_by_their_rates_and_final_models(tmp_path: Path) -> None:
    options = replace(OPTIONS, tokens=20_000)
    undisturbed = baseline(tmp_path, **comparable(options, NAMES, step_seconds=0.1))
    storm = storm_of(replace(options, baseline=undisturbed), tmp_path)
    done = training([], None, regions=NAMES, end_ns=80 * S, final=(20_500, 2.0))
    compared = storm.document([], None, done | {"tokens_merged": 2000})["compared"]
    assert compared["goodput"] == 0.75  # the undisturbed run had merged as many after 60 s
    assert compared["loss"] == {
        "tokens": 20_500, "own": 2.0, "undisturbed": 1.9, "undisturbed_tokens": 2100,
        "change": pytest.approx(2 / 1.9 - 1),
    }  # fmt: skip
    chaos = storm.document([], None, done | {"tokens_merged": 2000})
    text = "\n".join(storm_lines({"training": done, "chaos": chaos}))
    assert "the last 10,000 tokens were calm" in text
    assert "1.9000 at 2,100" in text


def test_of_a_summed_up_ledger_the_report_says_what_is_not_known(tmp_path: Path) -> None:
    storm = storm_of(replace(OPTIONS, baseline=baseline(tmp_path)), tmp_path)
    done = training([], None, regions=NAMES, end_ns=60 * S, final=(0, None))
    chaos = storm.document([], None, done)
    assert (chaos["rejoin"], chaos["seconds_of"]) == (None, None)
    assert "the ledger is summed up" in "\n".join(storm_lines({"training": done, "chaos": chaos}))


def test_without_a_baseline_the_report_says_how_to_get_one(tmp_path: Path) -> None:
    storm = storm_of(OPTIONS, tmp_path)
    done = training([], [], regions=NAMES, end_ns=60 * S, final=(0, None))
    chaos = storm.document([], [], done)
    assert (chaos["compared"], chaos["struck"]) == (None, {})
    text = "\n".join(storm_lines({"training": done, "chaos": chaos}))
    assert "--baseline FILE" in text
    assert "nothing was struck" in text

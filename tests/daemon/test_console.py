"""The lines at the terminal: few, and each once."""

from pathlib import Path
from typing import Any

import pytest

from diloco_node.codec import kernel_cache
from diloco_node.core.types import RunSettings
from diloco_node.daemon.console import LINE_CHARS_MAX, PACE_S, WAIT_TOLD_S, Console, ConsoleHandler, console_line


def status(**changes: Any) -> dict[str, Any]:
    document = {
        "state": "training",
        "region": "us",
        "leader": "eu",
        "peers": [{}, {}],
        "rounds_committed": 0,
        "learner": {"step": 0, "loss": None, "tokens_per_second": None},
        "run": {"step": 1100},
    }
    return document | changes


@pytest.fixture
def console(tmp_path: Path) -> Console:
    return Console("try", tmp_path, RunSettings(steps_max=20_000), now_s=0.0)


def test_a_run_from_joining_to_the_final_model(console: Console, tmp_path: Path) -> None:
    assert console.look({"state": "starting"}, "waits for the learner", now_s=1.0) == []
    assert console.look(status(), "", now_s=2.0) == ["joined run try: 3 regions, follows eu; trains"]
    assert [console.look(status(), "", now_s=2.0 + second) for second in range(1, int(PACE_S))] == [[]] * 59
    learner = {"step": 204, "loss": 2.3456789, "current_tokens_per_second": 12_345.6}
    assert console.look(status(learner=learner, inner_steps=1204, rounds_committed=48), "", now_s=2.0 + 2 * PACE_S) == [
        "run at step 1,100 of 20,000, learner at 1,204, loss 2.346, 12,346 tokens/s, 48 rounds, 24.0 a minute"
    ]
    (line,) = console.look(status(rounds_committed=50), "", now_s=2.0 + 3 * PACE_S)
    assert line.endswith("50 rounds, 2.0 a minute"), "since the line before"
    assert console.look(status(state="finished", rounds_committed=50), "", now_s=200.0) == []
    (tmp_path / "final.safetensors").touch()
    lines = console.look(status(state="finished", rounds_committed=50), "", now_s=201.0)
    assert lines == [f"run try is finished, 50 rounds; the model is in {tmp_path / 'final.safetensors'}"]
    assert console.look(status(state="finished", rounds_committed=50), "", now_s=202.0) == []


def test_only_what_lasts_is_told_and_once(console: Console) -> None:
    console.look(status(), "", now_s=0.0)
    assert console.look(status(), "no majority answers", now_s=1.0) == []
    assert console.look(status(), "", now_s=5.0) == [], "it was over before anybody had to know"
    assert console.look(status(), "no majority answers", now_s=6.0) == []
    assert console.look(status(), "no majority answers", now_s=5.0 + WAIT_TOLD_S) == [], "it began anew"
    assert console.look(status(), "no majority answers for 1 s", now_s=6.0) == []
    lines = console.look(status(), "no majority answers for 11 s", now_s=6.0 + WAIT_TOLD_S)
    assert lines == ["merges no more: no majority answers for 11 s"]
    assert console.look(status(), "no majority answers for 12 s", now_s=50.0) == []
    assert console.look(status(leader="us"), "", now_s=60.0) == ["is back in run try: 3 regions, leads; trains"]


def test_a_region_that_never_trained_says_what_it_waits_for(console: Console) -> None:
    console.look({"state": "starting"}, "waits for genesis", now_s=0.0)
    assert console.look({"state": "starting"}, "waits for genesis", now_s=WAIT_TOLD_S) == [
        "does not merge yet: waits for genesis"
    ]


def test_a_line_is_short_and_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    console_line("us", "ALARM: \x1b[31m" + "x" * 1000)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.isprintable()
    assert line[19:].startswith("Z us: ALARM: \\x1b[31mxxx")
    assert line.endswith(" ...")
    assert len(line) <= LINE_CHARS_MAX + 40


def test_a_module_that_knows_no_region_is_heard_at_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    handler = ConsoleHandler("us")
    kernel_cache.log.addHandler(handler)
    try:
        kernel_cache.log.warning("compiling kernels, %s", "once")
        kernel_cache.log.info("nothing for people")
    finally:
        kernel_cache.log.removeHandler(handler)
    shown = [line for line in capsys.readouterr().out.splitlines() if " us: " in line]
    assert [line.partition(" us: ")[2] for line in shown] == ["compiling kernels, once"]

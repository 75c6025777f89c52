"""How benchmarks/peers.py reads what its arms logged, and what it makes of an arm that is not there or ends."""

import json
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import peers
import peers_learner
import peers_network
import plots
import pytest
from peers import Arm, ArmEnded
from peers_network import LINKS, Network

from diloco_node.config.units import parse_rate
from diloco_node.lab.wan.namespaces import Place
from diloco_node.lab.wan.topology import parse_topology
from tests.kit.wan_probe import rate_of

NETWORK = Network([Place(name, "diloco-peers-all", "127.0.0.1") for name in "ab"])
FIGURES = {
    "rounds": 2, "seconds": 1.0, "seconds_min": 0.5, "seconds_max": 1.5, "wire_bytes": 8e7, "cpu_seconds": 0.5,
    "still_seconds": 0.1, "router_cpu_seconds": 0.2, "packets_late": 0, "load": 0.5,
}  # fmt: skip


def event(kind: str, at: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "at": at, "steps": int(100 * at), "still": 0.25 * at, **fields}


def arm_with(folder: Path, *logs: list[dict[str, Any]]) -> Arm:
    arm = Arm("allreduce", NETWORK, folder, events=[[] for _ in logs], read_bytes=[0] * len(logs))
    for rank, log in enumerate(logs):
        (folder / f"{rank}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in log))
    arm.read()
    return arm


@pytest.mark.parametrize("regions", [2, 4])
@pytest.mark.parametrize("link", list(LINKS)[1:])
def test_each_link_is_a_topology_and_keeps_its_rates(link: str, regions: int) -> None:
    topology = parse_topology(peers_network.topology(link, regions), name=link).first(regions)
    out, back = (rate_of(topology, *pair) for pair in (topology.names[:2], topology.names[1::-1]))
    assert out == back
    assert out == parse_rate({"1g": "1Gbit/s", "2g": "2Gbit/s", "lossy": "200Mbit/s", "home": "100Mbit/s"}[link])


def test_a_round_lasts_from_the_last_region_that_begins_to_the_last_that_ends(tmp_path: Path) -> None:
    first = [event("begin", 1.0, number=0), event("round", 4.0, number=0), event("begin", 6.0, number=1)]
    second = [event("begin", 3.0, number=0), event("round", 5.0, number=0), event("tick", 6.0)]
    arm = arm_with(tmp_path, first, second)
    assert arm.rounds() == {0: 2.0}, "round 1 has ended nowhere"
    assert (arm.finished(), arm.finished(since_s=4.5)) == (1, 0)
    assert peers.pace(arm.events[0]) == 500 / (5.0 - 1.25)
    with (tmp_path / "1.jsonl").open("a") as log:
        log.write('{"kind": "rou')
    arm.read()
    assert len(arm.events[1]) == 3, "half a line is none yet"
    (tmp_path / "1.jsonl").write_text("")
    with pytest.raises(ArmEnded, match="started again"):
        arm.read()


def test_a_round_of_ours_lasts_from_its_opening_to_the_last_offer(tmp_path: Path) -> None:
    arm = arm_with(tmp_path, [], [])
    arm.regions = [peers.RegionProcess(name, 1, tmp_path) for name in "ab"]
    arm.openings = {1: 10.0, 2: 20.0}
    arm.offers = {1: {"a": 11.0, "b": 12.5}, 2: {"a": 21.0}, 3: {"a": 31.0, "b": 31.0}}
    assert arm.rounds() == {1: 2.5}, "of 2 an offer is missing, of 3 the opening"


def test_figures_are_for_each_round_and_standstill_is_that_of_the_slowest_region(tmp_path: Path) -> None:
    log = [event(kind, at, number=n) for n in range(3) for kind, at in (("begin", 10.0 * n), ("round", 10.0 * n + n))]
    arm = arm_with(tmp_path, log, log)
    before = {"bytes": 0.0, "router_cpu": 1.0, "late": 2.0, "cpu": 3.0, "still 0": 0.0, "still 1": 1.0}
    after = {"bytes": 4e6, "router_cpu": 2.0, "late": 5.0, "cpu": 4.0, "still 0": 1.0, "still 1": 5.0}
    figures = peers.window(arm, {0}, before, after, seconds=30.0, rounds=2)
    assert (figures["seconds"], figures["seconds_min"], figures["seconds_max"]) == (1.5, 1.0, 2.0)
    assert (figures["wire_bytes"], figures["cpu_seconds"], figures["still_seconds"]) == (2_000_000, 0.5, 2.0)
    assert (figures["router_cpu_seconds"], figures["packets_late"], figures["cycle_seconds"]) == (0.5, 3, 15.0)


def test_turns_give_medians_and_a_turn_that_failed_gives_its_reason() -> None:
    slow = {**FIGURES, "seconds": 3.0, "seconds_max": 9.0, "cut": {"made": 0.0}}
    figures = peers.median([FIGURES, slow, FIGURES])
    assert (figures["seconds"], figures["seconds_min"], figures["seconds_max"]) == (1.0, 0.5, 9.0)
    assert (figures["rounds"], figures["turns"], figures["cuts"]) == (6, 3, [{"made": 0.0}])
    assert peers.median([FIGURES, {"reason": "ended"}])["reason"] == "ended"


def test_rows_say_what_a_cut_did_and_why_there_are_no_figures() -> None:
    start = {"arm": "torchft", "link": "1g", "regions": 2, "parameters": 20_971_520}
    cut = {"seconds": 20.0, "made": 0.05, "others": 0, "back_seconds": 3.25, "reason": None}
    words = peers.line({**start, **FIGURES, "cuts": [cut, {**cut, "reason": "no round after 60 s"}]})
    assert "1.00    (0.50, 1.50)     80   0.50   0.100    0.20     0" in words
    assert words.endswith(
        "5% of its steps in 20 s, others 0 rounds, back after 3.2 s; "
        "5% of its steps in 20 s, others 0 rounds, no round after 60 s"
    )
    assert peers.line({**start, "reason": "can't be installed"}).split(maxsplit=4)[4] == "can't be installed"


def test_what_can_not_be_installed_says_so_and_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[list[str]] = []

    def refuse(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        tries.append(command)
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution\nWARNING: old pip\n")

    monkeypatch.setattr(peers.venv, "create", lambda *_, **__: None)
    monkeypatch.setattr(peers.subprocess, "run", refuse)
    for _ in range(2):
        with pytest.raises(ArmEnded, match="can't be installed: ERROR: No matching distribution"):
            peers.environment("pccl", tmp_path)
    assert len(tries) == 1
    assert tries[0][-2:] == ["pypccl", peers.TORCH]


def test_a_process_that_ended_gives_its_last_words(tmp_path: Path) -> None:
    arm = arm_with(tmp_path, [], [])
    (tmp_path / "1.out").write_text("Traceback\nRuntimeError: connection closed by peer\n")
    arm.processes = [subprocess.Popen(["sh", "-c", "exit 3", "1"])]
    arm.processes[0].wait()
    with pytest.raises(ArmEnded, match="exit code 3: RuntimeError: connection closed by peer"):
        arm.check()


def test_the_loop_counts_what_is_spent_outside_of_its_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_learner, "SIDE", 4)
    training = peers_learner.Training(peers_learner.Spec(("x", "y"), 1, 2, 3, 0.0, str(tmp_path)), rank=1)
    before = [parameter.clone() for parameter in training.model.parameters()]
    answers = iter([True, False, True])
    with pytest.raises(StopIteration):
        training.rounds(lambda: next(answers))
    records = [json.loads(line) for line in (tmp_path / "1.jsonl").read_text().splitlines()]
    rounds = [(record["kind"], record["number"], record["steps"]) for record in records if record["kind"] != "tick"]
    assert rounds[:4] == [("begin", 0, 3), ("round", 0, 3), ("begin", 1, 6), ("refused", 1, 6)]
    assert rounds[4:] == [("begin", 1, 9), ("round", 1, 9), ("begin", 2, 12)]
    assert 0 < records[-1]["still"] < training.still_s
    for old, new in zip(before, training.model.parameters(), strict=True):
        assert not old.equal(new)


@pytest.mark.parametrize(("option", "word"), [("--arms", "torchfit"), ("--links", "5g"), ("--regions", "3")])
def test_a_word_that_names_nothing_is_refused(option: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.main([option, word])
    assert f"there is no {word!r}" in capsys.readouterr().err


def test_what_was_measured_before_an_early_end_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    row = {"arm": "pccl", "link": "1g", "regions": 2, "parameters": 20_971_520, "reason": "no"}

    def run_all(_: Any) -> Generator[dict[str, Any], None, None]:
        yield row
        raise SystemExit(1)

    monkeypatch.setattr(peers, "run_all", run_all)
    monkeypatch.setattr(peers.signal, "signal", lambda *_: None)
    monkeypatch.setattr(peers.os, "geteuid", lambda: 0)
    with pytest.raises(SystemExit):
        peers.main(["--json", "--links", "1g", "--peers", str(tmp_path)])
    result = json.loads(capsys.readouterr().out)
    assert result["rows"] == [row]
    assert result["command"].startswith("--json --links 1g")


def test_of_two_rows_for_the_same_the_later_file_counts_and_misses_are_bold(tmp_path: Path) -> None:
    start = {"link": "1g", "regions": 2, "parameters": 20_971_520, "cuts": []}
    cut = {"made": 0.5, "back_seconds": None, "reason": "no round after 60 s"}
    first = [{**start, **FIGURES, "arm": "torchft"}, {**start, **FIGURES, "arm": "ours", "seconds": 9.0}]
    again = [
        {**start, **FIGURES, "arm": "ours", "seconds": 1.01, "cuts": [cut]},
        {**start, "arm": "pccl", "reason": "no"},
    ]
    (tmp_path / "rounds-1.json").write_text(json.dumps({"date": "2026-11-26", "rows": first}))
    (tmp_path / "rounds-2.json").write_text(json.dumps({"date": "2026-11-27", "rows": again}))
    table = plots.rounds_table(plots.rows_of(tmp_path)).splitlines()
    assert table[2:] == [
        "| ours | **1.01 (0.50 to 1.50)** | 0.10 | 80 | 0.50 | **no round after 60 s** |",
        "| torchft 0.2.0 | 1.00 (0.50 to 1.50) | 0.10 | 80 | 0.50 |  |",
        "| PCCL | no | | | | |",
        "",
        "2026-11-26 and 2026-11-27, load average 0.5 to 0.5.",
    ]


def test_page_and_plots_show_the_kept_results() -> None:
    for name, svg in plots.plots(plots.RESULTS).items():
        assert (plots.DOCS / "evidence" / name).read_text() == svg, "run benchmarks/plots.py"
        assert ElementTree.fromstring(svg).tag.endswith("svg")
    for page, places in plots.tables(plots.RESULTS).items():
        for place, table in places.items():
            marked = f"<!-- {place}: benchmarks/plots.py -->\n\n{table}\n\n<!-- end of {place} -->"
            assert marked in (plots.DOCS / page).read_text(), "run benchmarks/plots.py"

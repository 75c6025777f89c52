"""`plan` as a user meets it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from diloco_node.cli.plan.inputs import parse_parameters
from diloco_node.config.budget_plan import BudgetPlan
from diloco_node.core.member_kind import MembershipBody
from diloco_node.core.merge.fragments import TensorSpec, build_manifest
from diloco_node.core.settings_body import SettingsBody
from diloco_node.core.types import Codec, RateLimits, RunSettings
from diloco_node.daemon.manifest_file import save_manifest
from diloco_node.main import app, main
from tests.kit.begun_kit import begin_run
from tests.kit.commands import run_command

COLUMNS = 100
RUN_TOML = """
[run]
id = "try"
[rounds]
fragments = 4
sync_every = 16
overlap_steps = 3
codec_down = "int4"
[regions.eu]
address = "127.0.0.1:7400"
[regions.us-east]
address = "127.0.0.1:7401"
[regions.us-west]
address = "127.0.0.1:7402"
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.chdir(tmp_path)


def plan_json(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", *arguments, "--json"], catch_exceptions=False)
    document: dict[str, Any] = json.loads(result.output)
    assert result.exit_code == (1 if document["verdict"]["fits"] is False else 0)
    return document


def plan_text(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["plan", *arguments], catch_exceptions=False)
    assert result.exit_code == ("Does not fit" in result.output), result.output
    assert max(len(line) for line in result.output.splitlines()) <= COLUMNS
    assert "…" not in result.output
    return result.output


def write_mesh(path: Path, rates: dict[tuple[str, str], int], rtt_s: float = 0.04) -> Path:
    names = sorted({name for pair in rates for name in pair})
    pairs = [
        {"from": a, "to": b, "rtt_seconds": rtt_s, "bytes_per_second": rate, "loss": 0.0}
        for (a, b), rate in rates.items()
    ]
    path.write_text(json.dumps({"regions": names, "pairs": pairs, "measured_at": "noon"}))
    return path


def full_mesh(*names: str, rate: int) -> dict[tuple[str, str], int]:
    return {(a, b): rate for a in names for b in names if a != b}


# ---- what it says ----------------------------------------------------------------------------------------------------


def test_the_named_target_in_words() -> None:
    text = plan_text("--parameters", "5e9", "--regions", "4", "--step-time", "1s", "--budget", "2Gbit/s")
    words = " ".join(text.split())
    assert "5 B parameters (--parameters 5e9) in 24 fragments of 208.3 M each" in words
    assert "int4 up and int8 down: 6 bits a value on average" in words
    assert "Does not fit: a cycle of H = 24 steps is 8.7 % too short" in words
    assert "1. rounds.sync_every = 27" in words
    assert '2. budget = "2.42Gbit/s"' in words
    assert '3. rounds.codec_down = "int4"' in words
    assert "out of each region 253.6 MB 2.03 Gbit/s 2.42 Gbit/s 2.00 Gbit/s 101 %" in words
    assert "each of 12 links 84.5 MB 676 Mbit/s" in words
    assert "daemon 20.0 GB 4.00 B" in words
    assert "checkpoints 160.0 GB 32.00 B" in words
    assert "round trip 40 ms (assumed)" in words
    assert "step (assumed)" not in words


def test_the_named_target_as_json() -> None:
    document = plan_json("-n", "5B", "-m", "4", "--budget", "2Gbit/s", "--rtt", "40ms")
    assert document["verdict"]["fits"] is False
    assert document["verdict"]["sync_every_min"] == 27
    assert document["verdict"]["changes"][0]["settings"] == {"rounds.sync_every": "27"}
    assert document["inputs"]["bits_per_value_mean"] == 6
    origins = {"model": "--parameters 5B", "step_time": "assumed", "rtt": "--rtt", "budget": "command line"}
    assert document["inputs"]["origins"] == origins
    flows = document["flows"]
    assert len(flows) == 4 + 4 + 12
    assert flows[0]["kind"] == "egress"
    assert flows[0]["average_bytes_per_second"] == pytest.approx(5e9 * 12.25 / 8 * 0.75 * 1.06 / 24, rel=1e-6)
    assert flows[0]["limit_bytes_per_second"] == 250_000_000
    assert document["round"]["wire_bytes_total"] == pytest.approx(4 * document["round"]["wire_bytes_per_region"])
    assert document["round"]["fits_overlap"] is False
    assert document["storage"]["daemon_bytes"] == 20 * 10**9


def test_what_fits_says_the_slack_and_the_least() -> None:
    text = plan_text("-n", "5B", "--budget", "4Gbit/s", "--set", "rounds.codec_down=int4")
    assert "Fits: " in text
    assert "% slack" in text
    # A round: 0.16 s of delays, 1 s of boundaries, 5e9 x 8.25 x 3/4 x 1.06 / 24 bits in 0.34 s; 12 of them are 18.02 s.
    assert "H could be as low as 19." in text
    # Twice 24 s for 24 rounds of 1.16 s and 170.8 MB: 0.84 s for each transfer.
    assert "The least budget that keeps this schedule is 1.63 Gbit/s in and out of every region." in text
    assert "Any one of these" not in text


def test_without_a_limit_only_needs_are_told() -> None:
    document = plan_json("-n", "1e6", "--regions", "2")
    assert document["verdict"]["fits"] is None
    assert document["round"]["total_seconds"] is None
    assert "neither a budget nor a mesh was given" in plan_text("-n", "1e6", "--regions", "2")


def test_flags_beat_what_the_run_says(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN_TOML)
    inputs = plan_json()["inputs"]
    assert (inputs["sync_every"], inputs["fragments"], inputs["codec_down"]) == (16, 4, "int4")
    assert inputs["regions"] == ["eu", "us-east", "us-west"]
    changed = plan_json(
        *("--config", "run.toml", "--set", "rounds.sync_every=40", "--set", "rounds.fragments=8"),
        *("--set", "rounds.overlap_steps=1", "--set", "rounds.rounds_in_flight_max=5"),
        *("--set", "rounds.codec_up=bf16", "--set", "rounds.codec_down=fp32"),
    )["inputs"]
    assert (changed["sync_every"], changed["fragments"], changed["overlap_steps"]) == (40, 8, 1)
    assert (changed["codec_up"], changed["codec_down"], changed["bits_per_value_mean"]) == ("bf16", "fp32", 24)
    assert changed["rounds_in_flight_max"] == 5


def test_the_size_is_the_flags_and_the_rest_is_the_runs(tmp_path: Path) -> None:
    assert plan_json("-n", "7B")["inputs"]["fragments"] == 24
    (tmp_path / "run.toml").write_text(RUN_TOML + BUDGET_TOML)
    for arguments in (("-n", "7B", "--config", "run.toml"), ("-n", "7B")):
        document = plan_json(*arguments)
        inputs = document["inputs"]
        assert (inputs["parameters"], inputs["fragments"], inputs["sync_every"]) == (7 * 10**9, 4, 16)
        assert inputs["regions"] == ["eu", "us-east", "us-west"]
        assert inputs["origins"]["model"] == "--parameters 7B, the rest from run.toml"
        assert {flow["limit_bytes_per_second"] for flow in document["flows"] if flow["kind"] == "ingress"} == {
            5_000_000
        }
    counted = plan_json("-n", "7B", "--regions", "5")["inputs"]
    assert (len(counted["regions"]), counted["fragments"]) == (5, 4), "regions that were counted are not run.toml's"
    assert main(["plan", "-n", "7B", "-c", "run.toml", "--regions", "5"]) == 2
    assert "--parameters for one of your own" in plan_json()["inputs"]["origins"]["model"]
    (tmp_path / "run.toml").write_text(RUN_TOML + "[model]\nlayers = 3\n")
    assert plan_json("-c", "run.toml")["inputs"]["origins"]["model"] == "run.toml, the built-in model"


def test_a_plan_that_does_not_fit_ends_with_exit_code_1() -> None:
    arguments = ["plan", "-n", "5B", "-m", "4", "--budget"]
    assert [main([*arguments, rate]) for rate in ("2Gbit/s", "20Gbit/s")] == [1, 0]
    assert [main([*arguments, rate, "--json"]) for rate in ("2Gbit/s", "20Gbit/s")] == [1, 0]
    assert main(["plan", "-n", "5B"]) == 0, "without a limit there is nothing that it does not fit"


BUDGET_TOML = """
egress = "30MB/s"
[budget]
egress = "20MB/s"
[[budget.schedule]]
start = "08:00"
end = "18:00"
ingress = "5MB/s"
"""


def test_the_budget_of_the_run_counts_and_the_command_line_beats_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN_TOML + BUDGET_TOML)

    def limits(*arguments: str) -> dict[tuple[str, str], int]:
        document = plan_json(*arguments)
        flows = [flow for flow in document["flows"] if flow["kind"] != "link"]
        return {(flow["region"], flow["kind"]): flow["limit_bytes_per_second"] for flow in flows}

    found = limits()
    assert {found[region, "ingress"] for region in ("eu", "us-east", "us-west")} == {5_000_000}, "the least of the day"
    assert [found[region, "egress"] for region in ("eu", "us-east", "us-west")] == [20_000_000, 20_000_000, 30_000_000]
    assert plan_json("-c", "run.toml")["verdict"]["fits"] is not None
    assert "run.toml" in plan_json()["inputs"]["origins"]["budget"]
    assert set(limits("--budget", "1MB/s").values()) == {1_000_000}
    out = limits("--egress", "1MB/s")
    assert (out["us-west", "egress"], out["us-west", "ingress"]) == (1_000_000, 5_000_000)
    assert plan_json("--egress", "1MB/s")["inputs"]["origins"]["budget"] == "command line"
    mesh = {
        "regions": ["eu", "us-east", "us-west"],
        "pairs": [
            {"from": a, "to": b, "rtt_seconds": 0.04, "bytes_per_second": 10**8}
            for a in ("eu", "us-east", "us-west")
            for b in ("eu", "us-east", "us-west")
            if a != b
        ],
    }
    (tmp_path / "mesh.json").write_text(json.dumps(mesh))
    assert limits("--mesh", "mesh.json") == found


def test_egress_and_ingress_may_differ() -> None:
    flows = plan_json("-n", "1B", "--budget", "2Gbit/s", "--ingress", "100MB/s")["flows"]
    limits = {flow["kind"]: flow["limit_bytes_per_second"] for flow in flows}
    assert limits == {"egress": 250_000_000, "ingress": 100_000_000, "link": None}


def test_output_that_is_piped_is_not_cut() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    done = run_command("plan", "-n", "5e9", "--budget", "2Gbit/s", env=environment)
    assert done.returncode == 1, "it does not fit"
    assert "…" not in done.stdout
    assert "101 %" in done.stdout


# ---- models ----------------------------------------------------------------------------------------------------------


def test_a_region_that_ran_knows_its_model(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN_TOML)
    folder = tmp_path / "state" / "us-east"
    folder.mkdir(parents=True)
    save_manifest(folder, build_manifest([TensorSpec("w", (1000, 10))], 4))
    document = plan_json()
    assert document["inputs"]["parameters"] == 10_000
    assert document["inputs"]["origins"]["model"] == "run.toml and the model in state/us-east"


def test_a_regions_folder_says_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "state" / "us-east"
    folder.mkdir(parents=True)
    assert main(["plan", str(folder)]) == 2
    write_node_file(folder)
    assert main(["plan", str(folder)]) == 6  # no model yet
    save_manifest(folder, build_manifest([TensorSpec("w", (1000, 10))], 5))
    document = plan_json(str(folder))
    assert document["inputs"]["parameters"] == 10_000
    assert document["inputs"]["fragments"] == 5
    assert document["inputs"]["sync_every"] == 20
    assert document["inputs"]["regions"] == ["eu", "us-east"]
    assert document["inputs"]["origins"]["step_time"] == "assumed"
    # Its daemon, when it answers, also tells step time and round trip.
    (folder / "admin.port").write_text("7")
    live = {"learner": {"step_seconds": 0.25}, "peers": [{"rtt_seconds": 0.03}, {"rtt_seconds": None}]}
    monkeypatch.setattr("diloco_node.cli.admin_client.ask", lambda target: live if target.port == 7 else {})
    inputs = plan_json(str(folder))["inputs"]
    assert (inputs["step_seconds"], inputs["rtt_seconds"]) == (0.25, 0.03)
    assert inputs["origins"]["step_time"] == "as it runs"
    monkeypatch.setattr("diloco_node.cli.admin_client.ask", lambda target: {"error": "no status"})
    assert plan_json(str(folder))["inputs"]["step_seconds"] == 1


def test_a_regions_ledger_says_what_orders_have_changed_since_its_start(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "us-east"
    changes = (MembershipBody("ap", "contributor", "ap:1"), MembershipBody("eu", "former"))
    ordered = SettingsBody.of(RunSettings(sync_every=40, overlap_steps=3))
    begin_run(folder, "try", ("eu", "us-east"), changes=(*changes, ordered))
    write_node_file(folder)
    inputs = plan_json(str(folder))["inputs"]
    assert (inputs["regions"], inputs["sync_every"]) == (["ap", "us-east"], 40)


def test_a_regions_folder_says_its_budget_and_run_toml_what_holds_now(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "us-east"
    folder.mkdir(parents=True)
    save_manifest(folder, build_manifest([TensorSpec("w", (1000, 10))], 5))
    run_toml = tmp_path / "run.toml"
    write_node_file(folder, budget=BudgetPlan(RateLimits(egress=7_000_000)), config_file=run_toml)

    def limits(*arguments: str) -> dict[tuple[str, str], int | None]:
        flows = plan_json(str(folder), *arguments)["flows"]
        return {
            (flow["region"], flow["kind"]): flow["limit_bytes_per_second"] for flow in flows if flow["kind"] != "link"
        }

    started = {("us-east", "egress"): 7_000_000, ("us-east", "ingress"): None}
    assert limits() == started | {("eu", "egress"): None, ("eu", "ingress"): None}, "run.toml is not at hand"
    run_toml.write_text(RUN_TOML + BUDGET_TOML)
    found = limits()
    assert found == {
        ("eu", "egress"): 20_000_000,
        ("us-east", "egress"): 20_000_000,
        ("eu", "ingress"): 5_000_000,
        ("us-east", "ingress"): 5_000_000,
    }, "us-west is no region of this run"
    assert plan_json(str(folder))["inputs"]["origins"]["budget"] == str(folder)
    assert set(limits("--budget", "1MB/s").values()) == {1_000_000}


def write_node_file(folder: Path, **more: Any) -> None:
    """As `start` writes it, for a region of two with five fragments and H = 20; `more` fields of the specification."""
    import dataclasses

    from diloco_node.daemon.spec import NodeSpec

    values: dict[str, Any] = {
        "region": "us-east",
        "run_id": "try",
        "regions": ("eu", "us-east"),
        "listen_host": "127.0.0.1",
        "listen_port": 7401,
        "peers": {"eu": "127.0.0.1:7400"},
        "state_dir": folder,
        "identity_dir": folder,
        "admin_port": 0,
        "learner_socket": folder / "l.sock",
        "supervisor_socket": folder / "s.sock",
        "settings": RunSettings(fragments=5, sync_every=20, codec_up=Codec.INT8),
        "settings_digest": "00",
        **more,
    }
    for spec_field in dataclasses.fields(NodeSpec):  # what else it holds is of no matter here
        defaults = {spec_field.default, spec_field.default_factory}
        if spec_field.name not in values and defaults == {dataclasses.MISSING}:
            values[spec_field.name] = False
    NodeSpec(**values).save(folder / "node.json")


@pytest.mark.parametrize(
    ("text", "count"),
    [("5e9", 5 * 10**9), ("5B", 5 * 10**9), ("350M", 350 * 10**6), ("1.5k", 1500), ("24", 24), ("5_000", 5000)],
)
def test_sizes_of_models(text: str, count: int) -> None:
    assert parse_parameters(text) == count


# ---- a measured mesh -------------------------------------------------------------------------------------------------


def test_a_mesh_names_regions_delays_and_the_slowest_link(tmp_path: Path) -> None:
    rates = full_mesh("eu", "us", "asia", rate=200_000_000) | {("asia", "eu"): 20_000_000}
    mesh = write_mesh(tmp_path / "mesh.json", rates, rtt_s=0.1)
    document = plan_json("-n", "1B", "--mesh", str(mesh))
    assert document["inputs"]["regions"] == ["asia", "eu", "us"]
    assert document["inputs"]["rtt_seconds"] == 0.1
    limits = {(flow["region"], flow["peer"]): flow["limit_bytes_per_second"] for flow in document["flows"]}
    assert limits["asia", "eu"] == 21_200_000  # payload was measured, wire is 6 % more
    assert document["verdict"]["busiest"] == "link asia to eu"
    assert document["verdict"]["fits"] is False
    keys = [tuple(change["settings"]) for change in document["verdict"]["changes"]]
    assert ("rounds.sync_every",) in keys
    assert ("budget",) not in keys
    text = plan_text("-n", "1B", "--mesh", str(mesh))
    assert "asia to eu" in text
    assert "Each region's line is taken to be as fast as its best link" in text


def test_a_budget_on_top_of_a_mesh_is_the_regions_line(tmp_path: Path) -> None:
    mesh = write_mesh(tmp_path / "mesh.json", full_mesh("a", "b", "c", rate=10**9))
    alone = plan_json("-n", "1B", "--mesh", str(mesh))
    assert alone["flows"][0]["limit_bytes_per_second"] == 1_060_000_000
    budgeted = plan_json("-n", "1B", "--mesh", str(mesh), "--budget", "10Mbit/s")
    assert budgeted["flows"][0]["limit_bytes_per_second"] == 1_250_000
    assert "budget" in {key for change in budgeted["verdict"]["changes"] for key in change["settings"]}


def test_a_run_is_planned_on_its_part_of_a_mesh(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN_TOML)
    mesh = write_mesh(tmp_path / "mesh.json", full_mesh("eu", "us-east", "us-west", "asia", rate=10**8))
    assert plan_json("--mesh", str(mesh))["inputs"]["regions"] == ["eu", "us-east", "us-west"]
    small = write_mesh(tmp_path / "small.json", full_mesh("eu", "us-east", rate=10**8))
    assert main(["plan", "--mesh", str(small)]) == 2


def test_a_mesh_that_lacks_pairs_is_planned_with_and_said(tmp_path: Path) -> None:
    rates = full_mesh("eu", "us-east", "us-west", rate=10**8)
    rates = {pair: rate for pair, rate in rates.items() if "us-west" not in pair}
    path = write_mesh(tmp_path / "mesh.json", rates)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"regions": ["eu", "us-east", "us-west"]}))
    document = plan_json("-n", "1B", "--mesh", str(path))
    limits = {(flow["region"], flow["kind"]): flow["limit_bytes_per_second"] for flow in document["flows"]}
    assert limits["us-west", "egress"] is None
    assert limits["eu", "egress"] == int(10**8 * 1.06)
    expected = "4 of 6 pairs were not measured, the first eu to us-west"
    assert document["inputs"]["origins"]["mesh"] == expected
    assert expected in " ".join(plan_text("-n", "1B", "--mesh", str(path)).split())


def test_a_large_mesh_shows_its_busiest_lines(tmp_path: Path) -> None:
    names = [f"region-{index}" for index in range(8)]
    rates = {pair: 10**8 + 10**6 * index for index, pair in enumerate(full_mesh(*names, rate=1))}
    text = plan_text("-n", "1B", "--mesh", str(write_mesh(tmp_path / "mesh.json", rates)))
    assert "lines with more room (--json has all)" in text
    assert "out of region-0" in text


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda mesh: mesh.pop("pairs"), "pairs: Field required; it must be"),
        (lambda mesh: mesh["pairs"].clear(), "pairs: List should have at least 1 item"),
        (lambda mesh: mesh["pairs"].append(mesh["pairs"][0]), "pair a to b is there twice"),
        (lambda mesh: mesh["pairs"][0].update({"to": "a"}), "pair a to a is there twice, or not of two regions"),
        (lambda mesh: mesh["pairs"][0].update({"to": "z"}), "not of two regions"),
        (lambda mesh: mesh["pairs"][0].update({"bytes_per_second": 0}), "bytes_per_second: Input should be greater"),
        (lambda mesh: mesh["pairs"][0].update({"bytes_per_second": None}), "0.bytes_per_second: Input should be a"),
        (lambda mesh: mesh["pairs"][1].update({"rtt_seconds": -0.1}), "pairs.1.rtt_seconds: Input should be greater"),
        (lambda mesh: mesh["pairs"][1].update({"rtt_seconds": True}), "pairs.1.rtt_seconds: Input should be a valid"),
        (lambda mesh: mesh.update({"regions": ["a"]}), "regions: List should have at least 2 items"),
        (lambda mesh: mesh.update({"regions": "ab"}), "regions: Input should be a valid array"),
        (lambda mesh: mesh.update({"pairs": 3}), "pairs: Input should be a valid array"),
        (lambda mesh: mesh["pairs"].append("a to b"), "pairs.2: Input should be an object"),
    ],
)
def test_a_bad_mesh_says_what_is_wrong(
    change: Any, hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_mesh(tmp_path / "mesh.json", full_mesh("a", "b", rate=10**8))
    mesh = json.loads(path.read_text())
    change(mesh)
    path.write_text(json.dumps(mesh))
    assert main(["plan", "-n", "1B", "--mesh", str(path)]) == 2
    error = capsys.readouterr().err
    assert hint in error
    assert error.count("\n") == 1


# ---- usage -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        ([], "which model? give its size (--parameters 5e9), a run"),
        (["-n", "5e9", "state/eu"], "--parameters and 'state/eu' both name a model"),
        (["-n", "five"], "write 5e9, 5B or 350M"),
        (["-n", "0"], "whole number from 1"),
        (["-n", "1.5"], "whole number from 1"),
        (["-n", "nan"], "whole number from 1"),
        (["-n", "23"], "can't be cut into 24 fragments: set rounds.fragments to 23 or less"),
        (["-n", "5B", "--budget", "2"], "--budget is '2': it has no unit"),
        (["-n", "5B", "--egress", "2Gbps"], "--egress is '2Gbps': unit 'Gbps' is unknown"),
        (["-n", "5B", "--step-time", "1"], "--step-time is '1': it has no unit"),
        (["-n", "5B", "--step-time", "0s"], "--step-time is 0"),
        (["-n", "5B", "--set", "rounds.codec_up=int2"], "--set rounds.codec_up is 'int2': Input should be 'int4'"),
        (["-n", "5B", "--set", "rounds.sync_every=2"], "overlap_steps is 2: it must be less than rounds.sync_every, 2"),
        (["-n", "5B", "--set", "rounds.sync_every=0"], "--set rounds.sync_every is '0'"),
        (["-n", "5B", "--set", "rounds.speed=2"], "write rounds.KEY=VALUE"),
        (["-n", "5B", "--set", "learner.hang=2s"], "write rounds.KEY=VALUE"),
        (["-n", "5B", "--mesh", "none.json"], "--mesh none.json can't be read (No such file or directory)"),
        (["-n", "5B", "--mesh", "/dev/null"], "--mesh /dev/null: Invalid JSON: EOF"),
        (["-n", "5B", "--mesh", "list.json"], "--mesh list.json: Input should be an object"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("list.json").write_text("[]")
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert hint in error
    assert error.count("\n") == 1


def test_regions_of_a_mesh_are_not_to_be_counted_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mesh = write_mesh(tmp_path / "mesh.json", full_mesh("a", "b", rate=10**8))
    assert main(["plan", "-n", "1B", "--mesh", str(mesh), "--regions", "3"]) == 2
    assert "--regions is 3, but the mesh names 2" in capsys.readouterr().err
    assert main(["plan", "-n", "1B", "--mesh", str(mesh), "--rtt", "3ms"]) == 2
    assert "--rtt and --mesh both say" in capsys.readouterr().err


# ---- the paper's tables ----------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given

from diloco_node.cli import status as status_cmd
from diloco_node.cli.admin_client import Target, ask, ask_all
from diloco_node.cli.places import find_targets, targets_in
from diloco_node.cli.status_view import (
    ALERTS_MAX,
    alert_lines,
    detail_lines,
    held_out_line,
    member_lines,
    run_line,
    status_lines,
)
from diloco_node.errors import ConfigError
from diloco_node.main import main
from tests.kit.health_kit import DOWN, changed, peers
from tests.kit.spoiled import spoiled

DOCUMENT: dict[str, Any] = {
    "region": "eu",
    "run_id": "try",
    "state": "running",
    "role": "leader",
    "reason": "all 3 due",
    "learner": {"step": 123, "tokens": 4567, "loss": 2.5, "tokens_per_second": 999.0},
    "versions": [4, 5],
    "rounds_committed": 9,
    "wire_bytes_out": 1_500_000,
    "wire_bytes_in": 12,
    "rounds": [{"fragment": 1, "version": 6, "ballot": "2.7", "reason": "grace: 120 ms left for us-east"}],
}


class Admin(BaseHTTPRequestHandler):
    """Just enough of the admin port; the real one is tested with its own client."""

    body: bytes = json.dumps(DOCUMENT).encode()

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/api/v1/status" else 404)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def admin() -> Iterator[int]:
    Admin.body = json.dumps(DOCUMENT).encode()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Admin)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)


def closed_port() -> int:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Admin)
    server.server_close()
    return int(server.server_port)


def test_status_of_a_port_shows_why_a_round_waits(admin: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(admin)]) == 0
    output = capsys.readouterr().out
    for word in ("eu", "leader", "123", "2.500", "4-5", "1.5 MB", "all 3 due"):
        assert word in output
    assert "eu: fragment 1 to version 6 (ballot 2.7): grace: 120 ms left for us-east" in output


def test_status_as_json_is_the_document(admin: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(admin), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"regions": [DOCUMENT]}


def test_status_ignores_proxies(admin: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{closed_port()}")
    assert ask(Target("x", admin)) == DOCUMENT


def test_a_folder_of_regions_shows_all_and_marks_the_dead(
    admin: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, port in (("b-dead", closed_port()), ("a-live", admin)):
        (tmp_path / "demo" / name).mkdir(parents=True)
        (tmp_path / "demo" / name / "admin.port").write_text(f"{port}\n")
    assert [target.name for target in targets_in("demo")] == ["a-live", "b-dead"]
    assert targets_in("demo/a-live") == [Target("a-live", admin, Path("demo/a-live"))]
    assert main(["status", "demo"]) == 0  # one answers
    output = capsys.readouterr().out
    assert "down" in output
    assert "Connection refused" in output
    assert main(["status", "demo", "--json"]) == 0
    regions = json.loads(capsys.readouterr().out)["regions"]
    assert [region["region"] for region in regions] == ["eu", "b-dead"]
    assert "no status from 127.0.0.1:" in regions[1]["error"]


def test_nobody_answers_is_exit_code_5(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(closed_port())]) == 5
    streams = capsys.readouterr()
    assert streams.out == ""
    assert "none of 1 regions answers" in streams.err
    assert streams.err.count("\n") == 1


def test_status_of_run_toml_asks_the_regions_that_run_here(
    admin: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(
        f'run.id = "try"\n[regions.eu]\naddress = "a:1"\nadmin_port = {admin}\n[regions.us]\naddress = "b:1"\n'
    )
    assert main(["status", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["regions"]) == 1
    (tmp_path / "run.toml").write_text('run.id = "try"\n[regions.eu]\naddress = "a:1"\n')
    assert main(["status"]) == 5
    assert "no region of run try has run here" in capsys.readouterr().err
    (tmp_path / "state/eu").mkdir(parents=True)
    (tmp_path / "state/eu/admin.port").write_text(str(admin))
    assert main(["status", "--json"]) == 0


@pytest.mark.parametrize("place", ["0", "70000", "nowhere", ".", 300 * "x"])
def test_a_place_that_is_no_region_is_refused(place: str) -> None:
    with pytest.raises(ConfigError, match=r"is no region of run.toml that has run here, and no folder with admin.port"):
        find_targets([place], None)


def test_a_damaged_port_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "admin.port").write_text("7x")
    with pytest.raises(ConfigError, match="holds '7x', not a port"):
        targets_in(str(tmp_path))


@given(spoiled(changed() | DOCUMENT | {"notes": [{"is_alarm": True, "text": "x"}]}))
def test_a_document_of_another_version_is_shown_as_far_as_it_goes(document: dict[str, Any]) -> None:
    answer = SimpleNamespace(read=lambda _: json.dumps(document).encode())
    connection: Any = SimpleNamespace(request=lambda *_: None, getresponse=lambda: answer, close=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Target, "connection", lambda _: connection)
        answer = ask(Target("x", 1))
    assert any(line.startswith(str(answer["region"])) for line in status_lines([answer], 80))


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff\xfe", b"3", b"[" * 100_000])
def test_an_answer_that_is_no_document_is_an_error_of_that_region(admin: int, body: bytes) -> None:
    Admin.body = body
    assert "no status from" in ask(Target("x", admin))["error"]


def test_all_regions_are_asked_at_the_same_time(admin: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answers only when the other one has been asked, too."""
    barrier = threading.Barrier(2, timeout=60)
    answer = Admin.do_GET

    def answer_both(handler: Admin) -> None:
        barrier.wait()
        answer(handler)

    monkeypatch.setattr(Admin, "do_GET", answer_both)
    assert [document.get("state") for document in ask_all([Target("eu", admin)] * 2)] == ["running"] * 2


def test_watch_asks_again_until_ctrl_c(
    admin: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    naps = []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(status_cmd.time, "sleep", nap)
    assert main(["status", str(admin), "--watch", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == [{"regions": [DOCUMENT]}] * 3
    naps.clear()
    assert main(["status", str(admin), "--watch"]) == 0
    output = capsys.readouterr().out
    assert output.count("leader") == 3
    assert status_cmd.CLEAR not in output, "no screen to empty in a pipe"
    naps.clear()
    monkeypatch.setattr(status_cmd.sys.stdout, "isatty", lambda: True)
    assert main(["status", str(admin), "--watch"]) == 0
    assert capsys.readouterr().out.count(status_cmd.CLEAR) == 3


def test_a_starting_region_and_markup_are_shown_as_they_are() -> None:
    lines = status_lines([{"region": "eu", "run_id": "try", "state": "starting", "reason": "[red]x[/red]"}], 80)
    assert lines[0] == "starting: [red]x[/red]"
    assert lines[1] == "run try"
    assert "starting" in lines[3]
    assert lines[4] == "  [red]x[/red]"


LONG_REASON = "grace: 120 ms left for us-east, whose link has been down for 12 s (connection refused)"


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_reasons_are_wrapped_below_their_rows(width: int) -> None:
    neighbour = {**DOCUMENT, "region": "ap-southeast", "reason": LONG_REASON, "rounds": []}
    lines = status_lines([DOCUMENT, neighbour, {"region": "us", "error": "no status from 127.0.0.1:1"}], width)
    assert max(len(line) for line in lines) <= width
    starts = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert starts == ["healthy:", "run", "region", "eu", "ap-southeast", "us", "eu:"]
    first, last = lines.index("  all 3 due") + 2, next(at for at, line in enumerate(lines) if line.startswith("us "))
    assert " ".join(line.strip() for line in lines[first:last]) == LONG_REASON
    assert lines[last + 1] == "  no status from 127.0.0.1:1"


def test_piped_lines_are_whole(admin: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("COLUMNS")
    Admin.body = json.dumps({**DOCUMENT, "reason": 3 * LONG_REASON}).encode()
    assert main(["status", str(admin)]) == 0
    assert f"  {3 * LONG_REASON}\n" in capsys.readouterr().out


def test_details_name_open_rounds_and_the_last_alarm() -> None:
    document = {
        "region": "eu",
        "alarms": 7,
        "notes": [
            {"text": "first", "is_alarm": True},
            {"text": "digest differs", "is_alarm": True},
            {"text": "fine", "is_alarm": False},
        ],
        "rounds": [{"fragment": 0, "version": 1}, "junk"],
        "learner": {"at_stake": {"unsaved_steps": 30, "unmerged_steps": 4}},
        "learner_process": {"lost": {"unsaved_steps": 99, "unmerged_steps": 12}},
    }
    assert detail_lines(document, None) == [
        "eu: fragment 0 to version 1: open",
        "eu: an end of the learner would lose 4 steps that no merge includes, and moments of 30 steps",
        "eu: the learner's last end lost 12 steps that no merge includes, and moments of 99 steps",
        "eu: 7 alarms, the last: digest differs",
    ]
    assert detail_lines({"region": "eu", "alarms": 1, "notes": [{"text": "first", "is_alarm": True}]}, None) == [
        "eu: 1 alarm: first"
    ]
    assert detail_lines({"region": "eu", "peers": None}, None) == []
    none = {"unsaved_steps": 0, "unmerged_steps": 0}
    assert detail_lines({"region": "eu", "learner": {"at_stake": none}}, None) == [], "nothing is at stake"


def test_alerts_are_shown_with_what_helps() -> None:
    lines = status_lines([changed(learner=None, learner_process={"state": "done", "exit_code": 0})], None)
    assert lines[0] == "degraded: us: the learner ended at step 64, the run is at 64 of 250"
    at = lines.index("× A-LEARNER-ENDED: us: the learner ended at step 64, the run is at 64 of 250")
    assert lines[at + 1].startswith("  -> Have the script call attach()")
    assert lines[at + 1].endswith("`diloco-node learner start us`")


def test_of_many_alerts_the_gravest_are_shown_and_the_others_counted() -> None:
    left_out = [{"region": f"r{at}", "part": "member", "reason": "late"} for at in range(20)]
    lines = alert_lines([changed(left_out=left_out)], None)
    assert len(lines) == 2 * ALERTS_MAX + 1
    assert lines[-1] == f"{20 - ALERTS_MAX} more alerts: `diloco-node status --json`"


def test_all_regions_of_the_run_are_shown_from_one() -> None:
    facts = {"steps_of": {"eu": 60, "ap": 12}, "participation_of": {"eu": 0.98}, "leader": "eu", "role": "follower"}
    one_way = {"applied_index": 40, "rtt_seconds": 0.09, "step": 9}
    document = changed(peers=peers(eu=one_way, ap=DOWN | {"applied_index": 7})) | facts
    lines = status_lines([document], 80)
    assert max(map(len, lines)) <= 80
    eu, ap = (next(at for at, line in enumerate(lines) if line.startswith(name)) for name in ("eu*", "ap*"))
    assert lines[eu].split()[:3] == ["eu*", "leader", "60"]
    assert lines[eu + 1] == "  90 ms away, in 98 % of the merges"
    assert lines[ap].split()[:3] == ["ap*", "down", "12"]
    assert lines[ap + 1] == "  33 ledger entries behind, Connection refused"
    assert "* as seen from us" in lines
    dead = changed(peers=peers(eu=one_way | {"step": None})) | facts
    assert "  90 ms away" in status_lines([dead], 80), "its learner is in no merge, whatever the ratio of its life was"
    healed = changed(peers=peers(eu=one_way | {"error": "of an earlier link"})) | facts
    assert "  90 ms away, in 98 % of the merges" in status_lines([healed], 80)
    unheard = changed(peers=peers(eu=one_way, ap=DOWN | {"applied_index": 0})) | facts
    assert "  Connection refused" in status_lines([unheard], 80), "how far it is nobody has said"
    members = {"rows": [{"region": "eu", "kind": "contributor"}, {"region": "us", "kind": "contributor"}]}
    quiet = status_lines([document | {"members": members, "leader": "ap"}], 80)
    assert ["eu*", "contributor"] in [line.split()[:2] for line in quiet]
    assert ["us", "contributor"] in [line.split()[:2] for line in quiet]
    neighbour = changed() | {"region": "eu"}
    assert not any(line.startswith("eu*") for line in status_lines([document, neighbour], 80)), "it was asked itself"


def test_a_member_that_waits_says_for_what_and_the_run_what_it_bears() -> None:
    def member(name: str, state: str, **more: Any) -> dict[str, Any]:
        return {"region": name, "kind": "voter", "since": 1, "has_folder": True, "state": state} | more

    joiner = {"kind": "contributor", "since": 40, "has_folder": False}
    rows = [member("us", "there"), member("eu", "away"), member("ap", "away, waits for a link", **joiner)]
    seen = changed(members={"tolerance": "2 voters, 2 must be there", "rows": [*rows, member("x", "", kind="former")]})
    own = changed(region="ap", members={"rows": [member("ap", "fetches the model: 1.0 of 8.0 MB", **joiner)]})
    assert member_lines([seen]) == [
        "members: 2 voters, 2 must be there",
        "ap: contributor since entry 40; away, waits for a link",
    ]
    seen["members"]["rows"].append(member("w", "away: nobody answers", kind="witness", since=7))
    assert member_lines([seen])[-1] == "w: witness since entry 7; away: nobody answers"
    own["applied_index"] = 3
    assert member_lines([own, seen])[1] == "ap: contributor since entry 40; fetches the model: 1.0 of 8.0 MB"
    dated = changed(members={"rows": [member("ap", "", **joiner, since_unix=0.5)]})
    assert re.fullmatch(r"ap: contributor since entry 40, 19(69|70)-\d\d-\d\d \d\d:\d\d:\d\d", member_lines([dated])[0])
    assert member_lines([changed(), {"region": "x", "error": "down"}]) == []
    over = member_lines([seen | {"state": "finished"}])
    assert not over[0].startswith("members: "), "nothing is merged any more"


def test_the_run_has_its_name_its_end_and_the_time_that_is_left() -> None:
    run = {"id": "try", "step": 64, "total_steps": 250, "tokens": 1_200_000, "tokens_total": None, "eta_seconds": 720.0}
    assert run_line([{"run": run}]) == "run try: step 64 of 250, 1,200,000 tokens merged, 12 min left"
    behind = run | {"step": 9, "tokens": 7}
    assert run_line([{"run": behind}, {"run": run}, {"run": behind}]).startswith("run try: step 64 "), "who knows most"
    assert run_line([{"run_id": "try"}, {}]) == "run try"
    assert held_out_line([{"region": "a", "learner": {"loss": 1.0}}, {"region": "b", "error": "down"}]) == ""
    own, merged = {"val_loss": 3.21, "val_loss_step": 1400}, {"val_loss_global": 3.1, "val_loss_global_step": 1200}
    documents = [{"region": "a", "learner": own | merged}, {"region": "b", "learner": merged}, {"region": "c"}]
    assert held_out_line(documents) == (
        "held-out loss: a own 3.210 at step 1,400, a merged 3.100 at step 1,200, b merged 3.100 at step 1,200"
    )
    assert run_line([]) == ""


def test_a_region_of_run_toml_is_a_place(admin: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    regions = "".join(f'[regions.{name}]\naddress = "{name}:1"\n' for name in ("eu", "us"))
    (tmp_path / "run.toml").write_text(f'run.id = "try"\n{regions}')
    for name, port in (("eu", admin), ("us", closed_port())):
        (tmp_path / "state" / name).mkdir(parents=True)
        (tmp_path / "state" / name / "admin.port").write_text(f"{port}\n")
    assert main(["status", "eu", "--json"]) == 0
    assert [document["region"] for document in json.loads(capsys.readouterr().out)["regions"]] == ["eu"]
    assert main(["status", "mars"]) == 2
    assert "is no region of run.toml that has run here" in capsys.readouterr().err


def test_what_a_peer_wrote_reaches_no_terminal_as_it_is(admin: int, capsys: pytest.CaptureFixture[str]) -> None:
    reason = "declined: \x1b[2J\u202e\nus-east: all is well"
    alarm = {"kind": "report", "text": "eu: \x9b31m", "is_alarm": True}
    Admin.body = json.dumps(DOCUMENT | {"reason": reason, "alarms": 1, "notes": [alarm]}).encode()
    assert main(["status", str(admin)]) == 0
    output = capsys.readouterr().out
    assert "\\x1b[2J\\u202e\\nus-east" in output
    assert "\\x9b31m" in output
    assert all(line.isprintable() for line in output.split("\n"))
    assert main(["status", "\x1b[31m"]) == 2
    assert "\x1b" not in capsys.readouterr().err

"""cli/join.py: a region learns its run from one member, which may show anything."""

import asyncio
import contextlib
import datetime as dt
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from diloco_node.cli import join
from diloco_node.cli.join import join_run
from diloco_node.cli.options import load
from diloco_node.cli.start import check_data
from diloco_node.config.resolve import NodeConfig
from diloco_node.daemon import run_record
from diloco_node.errors import ConfigError, DilocoError, IdentityError, PeersUnreachable
from diloco_node.transport.authority import add_regions, init_run, renew_regions
from diloco_node.wire.envelope import LinkRole
from diloco_node.wire.run_shown import MemberShown, RunShown
from tests.kit.transport_kit import RUN, Mesh, address, meshed

SETTINGS = ('run.id="run1"', "run.steps=48", "model.dim=16", "rounds.sync_every=8")
FLAGS = ("run.state_dir", "run.certs_dir", "regions.d.address", "regions.d.admin_port", "data.paths")


@pytest.fixture
async def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Mesh]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(join, "PATIENCE_S", 0.0)
    async with meshed(tmp_path) as mesh:
        add_regions(tmp_path / "run", ["d"])
        yield mesh


def agreement() -> dict[str, Any]:
    """The settings of the run and their digest, as a hello has them."""
    tables: dict[str, list[str]] = {}
    for line in SETTINGS:
        key, _, value = line.partition("=")
        table, _, name = key.partition(".")
        tables.setdefault(table, []).append(f"{name} = {value}")
    path = Path("shown.toml")
    path.write_text("\n".join(f"[{table}]\n" + "\n".join(rows) for table, rows in tables.items()) + "\n[regions.a]\n")
    config = load(path)
    shared = tuple(f"{key}={value}" for key, value in config.shared_settings().items())
    return {"settings_digest": config.settings_digest(), "settings": shared}


def run_toml(text: str = "") -> str:
    """Write the file, if there is a text; what is in it."""
    path = Path("run.toml")
    if text:
        path.write_text(text)
    return path.read_text() if path.exists() else ""


def run_of(*members: str, settings: tuple[str, ...] = SETTINGS, changes: int = 3) -> RunShown:
    """The run with these members; b is the only one that nobody can dial."""
    places = tuple(MemberShown(name, "" if name == "b" else f"{name}.example:7400") for name in members)
    return RunShown(settings, places, "a", changes)


def trust_both(folder: Path, other: Path) -> None:
    """Make certificates for d by an authority of its own, and have d trust that of another folder, too."""
    init_run(folder, RUN, ["d"])
    (folder / "d" / "ca.pem").write_bytes((other / "ca.pem").read_bytes() + (folder / "ca.pem").read_bytes())


async def member(mesh: Mesh, show_run: Callable[[], RunShown]) -> str:
    """The address of a running member that shows this run."""
    options = {**agreement(), "show_run": show_run}
    a, _ = await mesh.start("a", {"b": None}, **options)
    return address(a)


async def joined(
    place: str,
    *,
    region: str = "d",
    words: Sequence[str] = (),
    check: Callable[[NodeConfig], None] = lambda _: None,
    **flags: Any,
) -> None:
    """Join by the member at an address, with the certificates of the run. words: of --set."""
    values = {
        f"regions.{region}.address": None,
        **dict.fromkeys(FLAGS),
        "run.certs_dir": "run",
        **{key.replace("__", "."): flags[key] for key in flags},
    }
    pairs = {key: (f"--{key}", value) for key, value in values.items()}
    await asyncio.to_thread(join_run, region, place, None, pairs, words, check=check)


async def test_what_a_member_shows_becomes_the_run_toml_of_the_next_start(mesh: Mesh) -> None:
    place = await member(mesh, lambda: run_of("a", "b", "d"))
    await joined(place, regions__d__admin_port=7499, data__paths=["here.txt"])
    settings = load(Path("run.toml"))
    assert (settings.run.id, settings.run.steps, settings.rounds.sync_every, settings.model.dim) == ("run1", 48, 8, 16)
    addresses = {name: section.address for name, section in settings.regions.items()}
    assert addresses == {"a": "a.example:7400", "b": None, "d": "d.example:7400"}
    assert (settings.regions["d"].joined, settings.regions["d"].admin_port, settings.regions["a"].joined) == (
        3,
        7499,
        0,
    )
    assert settings.run.certs_dir == mesh.folder / "run"
    assert settings.data.paths == (str(mesh.folder / "here.txt"),)
    before = run_toml()
    await joined(place)
    assert run_toml() == before, "the next start with --join goes on with it"


async def test_who_is_not_listed_says_how_to_be_and_waits(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(join, "POLL_S", 0.01)
    answers = [run_of("a", "b"), run_of("a", "b"), run_of("a", "b", "d")]
    place = await member(mesh, lambda: answers.pop(0))
    await joined(place, regions__d__address="d.example:7400")
    first, second = capsys.readouterr().err.splitlines()
    assert "`diloco-node members add d a --address d.example:7400 --ca-key ca.key`. This waits for it" in first
    assert "d is a member of run run1: run.toml is written" in second


@pytest.mark.parametrize(
    ("word", "fault"),
    [
        ("rounds.sync_every=16", r"is 16 \(--set rounds\.sync_every\), but 8 in the run, as a shows it: leave it out"),
        ("rounds.fragments=3", r"rounds\.fragments is 3 \(--set rounds\.fragments\), but 24 in the run, as a shows it"),
        ("run.steps=96", r"run\.steps is 96 \(--set run\.steps\), but 48 in the run, as a shows it: leave it out"),
        ("rounds.outer_lr=0.123", r"rounds\.outer_lr is 0\.123 \(--set rounds\.outer_lr\), but 0\.\d+ in the run"),
        ("rounds.sync_every=often", r"rounds\.sync_every is \"often\" \(--set rounds\.sync_every\)"),
        ("rounds.often=1", r"rounds\.often"),
        ('data.paths=["here.txt"]', "that is a list, as run.toml has it: write PATH here, or PATH:PATH"),
        ("data.paths=nowhere.txt", r"nowhere\.txt \(--set data\.paths\) does not exist"),
    ],
)
async def test_what_is_set_wrongly_here_is_refused_before_the_region_waits(mesh: Mesh, word: str, fault: str) -> None:
    """Else the operator adds a region that can't start, or that goes by other settings than it was told."""
    place = await member(mesh, lambda: run_of("a", "b"))
    with pytest.raises(ConfigError, match=fault):
        await joined(place, words=[word], check=check_data)
    assert run_toml() == ""


async def test_a_variable_of_this_machine_that_differs_from_the_run_is_refused(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = await member(mesh, lambda: run_of("a", "b", "d"))
    monkeypatch.setenv("DILOCO_ROUNDS__SYNC_EVERY", "16")
    with pytest.raises(ConfigError, match=r"sync_every is 16 \(DILOCO_ROUNDS__SYNC_EVERY\), but 8 in the run"):
        await joined(place)
    monkeypatch.setenv("DILOCO_ROUNDS__SYNC_EVERY", "8")
    outer_lr = load(Path("shown.toml")).run_settings().outer_lr
    await joined(place, words=["rounds.sync_every=8", f"rounds.outer_lr={outer_lr}", "model.lr=0.01"])
    assert (load(Path("run.toml")).rounds.sync_every, load(Path("run.toml")).model.lr) == (8, 0.01)


async def test_a_member_that_starts_just_now_is_waited_for(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else a service manager that starts `start --join` again five times has given up before the member is back."""
    monkeypatch.setattr(join, "POLL_S", 0.01)
    monkeypatch.setattr(join, "PATIENCE_S", 60.0)
    place, ask = await member(mesh, lambda: run_of("a", "b", "d")), join._ask
    places = ["127.0.0.1:1", "127.0.0.1:1", place]
    monkeypatch.setattr(join, "_ask", lambda folder, identity, _: ask(folder, identity, places.pop(0)))
    await joined(place)
    first, second = capsys.readouterr().err.splitlines()
    assert "nobody answers there" in first
    assert first.endswith("This tries again for 60 s")
    assert "d is a member of run run1" in second


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ((*SETTINGS, 'learner.preload=["os"]'), "which is no setting that regions share"),
        ((*SETTINGS, 'run.state_dir="/"'), "which is no setting that regions share"),
        ((*SETTINGS, 'model.lr=1e-3\n[learner]\npreload = ["os"]'), "which is no setting that regions share"),
        ((*SETTINGS, "model.lr=" + "[" * 4000), "which is no setting that regions share"),
        ((*SETTINGS, "rounds.heartbeat=7"), "rounds.heartbeat is 7"),
        (
            (*SETTINGS, "rounds.payload_versions=16"),
            "with other settings than it shows, or another version: rounds.payload_versions is 16 here, 4 there",
        ),
        (SETTINGS[1:], "run.id is not set"),
    ],
)
async def test_settings_that_can_not_be_are_refused(mesh: Mesh, settings: tuple[str, ...], fault: str) -> None:
    place = await member(mesh, lambda: run_of("a", "b", "d", settings=settings))
    with pytest.raises(ConfigError, match=fault):
        await joined(place)
    assert run_toml() == ""


async def test_a_run_that_lost_members_takes_one_in_whatever_quorum_it_was_founded_with(mesh: Mesh) -> None:
    """Two of three were removed. A quorum of three means all there are, and the joiner alone can't change it."""
    shown = (*SETTINGS, "rounds.quorum_min=3")
    await joined(await member(mesh, lambda: run_of("a", "d", settings=shown)))
    assert load(Path("run.toml")).rounds.quorum_min == 3


async def test_a_region_that_was_added_again_has_the_new_number_of_changes(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signed list without it, of the change before, would end it."""
    runs = [run_of("a", "b", "d"), run_of("a", "b", "d", changes=6)]
    place = await member(mesh, lambda: runs[-1])
    newest = runs.pop()
    await joined(place)
    runs.append(newest)
    run_toml(run_toml() + "\n# by hand\n")
    before = run_toml()
    await joined("127.0.0.1:1")
    assert run_toml() == before, "nobody is there to be asked"
    with monkeypatch.context() as context:
        context.setattr(run_record, "read_run_record", lambda _: object())
        await joined(place)
    assert run_toml() == before, "its ledger knows"
    await joined(place)
    assert run_toml() == before.replace("joined = 3", "joined = 6")


async def test_what_is_of_use_to_that_member_alone_is_not_taken_over(
    mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = '{learning_rate = 0.01, push_to_hub = true, output_dir = "/", optim = ["x"], bf16 = true}'
    shown = (*SETTINGS, 'model.hf="org/name"', f"model.hf_args={arguments}")
    await joined(await member(mesh, lambda: run_of("a", "b", "d", settings=shown)))
    assert load(Path("run.toml")).model.hf_args == {"learning_rate": 0.01, "bf16": True}
    assert "model.hf_args of a is taken without optim, output_dir, push_to_hub" in capsys.readouterr().err


@pytest.mark.parametrize("setting", ["model.ranks=64", "model.threads=64", 'model.shard="fsdp"'])
async def test_what_each_machine_has_of_its_own_is_refused(mesh: Mesh, setting: str) -> None:
    place = await member(mesh, lambda: run_of("a", "b", "d", settings=(*SETTINGS, setting)))
    with pytest.raises(ConfigError, match="which is no setting that regions share"):
        await joined(place)


async def test_a_folder_of_the_member_is_asked_for_here(mesh: Mesh) -> None:
    place = await member(mesh, lambda: run_of("a", "b", "d", settings=(*SETTINGS, 'model.hf="/models/llama"')))
    with pytest.raises(ConfigError, match=r"model\.hf is a folder of a: bring it here, and add --set model\.hf=FOLDER"):
        await joined(place)


async def test_each_wrong_way_is_one_line(mesh: Mesh, tmp_path: Path) -> None:
    place = await member(mesh, lambda: run_of("a", "b", "d"))

    async def refusal(kind: type[DilocoError], where: str = place, **flags: Any) -> str:
        with pytest.raises(kind) as refused:
            await joined(where, **flags)
        assert "\n" not in str(refused.value)
        return str(refused.value)

    assert "nobody answers there" in await refusal(PeersUnreachable, "127.0.0.1:1")
    assert "nobody answers there" in await refusal(PeersUnreachable, "nowhere.invalid:7400")
    assert "--join is 'a': it must be" in await refusal(ConfigError, "a")
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
        silent = asyncio.to_thread(lambda: server.accept()[0].close())
        where = f"127.0.0.1:{server.getsockname()[1]}"
        reasons = await asyncio.gather(refusal(PeersUnreachable, where), silent)
        assert "no region of diloco-node" in reasons[0] or "nobody answers" in reasons[0]
    assert "is missing" in await refusal(IdentityError, run__certs_dir="nowhere")
    init_run(tmp_path / "other", "other", ["d"])
    assert "of another authority than that of run other" in await refusal(IdentityError, run__certs_dir="other")
    add_regions(tmp_path / "run", ["e"])
    for days, words in ((-400, "has ended by this machine's clock"), (400, "begins later than this machine's clock")):
        renew_regions(tmp_path / "run", ["e"], now=dt.datetime.now(dt.UTC) + dt.timedelta(days=days))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "run" / "e" / "node.pem", tmp_path / "run" / "e" / "node.key")
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
        async with server:
            assert words in await refusal(IdentityError, f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    assert "a itself runs there already" in await refusal(ConfigError, region="a")
    assert "was added at d.example:7400" in await refusal(ConfigError, regions__d__address="d2.example:7400")
    measuring, _ = await mesh.start("c", {"d": None}, role=LinkRole.MEASURING)
    assert "that is no training daemon" in await refusal(ConfigError, address(measuring))
    run_toml('[run]\nid = "other"\n[regions.d]\n')
    assert "run.toml is there already, of run other" in await refusal(ConfigError)


async def test_a_settings_document_that_is_too_long_is_not_told(mesh: Mesh) -> None:
    place = await member(mesh, lambda: run_of("a", "d", settings=("model.hf_args=" + "x" * 5000,)))
    with pytest.raises(PeersUnreachable, match=r"can't be told .*: copy run\.toml from a region"):
        await joined(place)


async def test_a_certificate_of_the_run_is_needed_to_ask(mesh: Mesh, tmp_path: Path) -> None:
    place = await member(mesh, lambda: run_of("a", "d"))
    trust_both(tmp_path / "mixed", tmp_path / "run")
    with pytest.raises(IdentityError, match="does not trust our certificate"):
        await joined(place, run__certs_dir="mixed")

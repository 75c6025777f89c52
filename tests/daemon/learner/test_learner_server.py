"""The real server on a real Unix socket, spoken to by a bare asyncio stream."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from diloco_node.core.merge.fragments import TensorSpec
from diloco_node.core.types import FragmentPosition, MergeRule
from diloco_node.daemon.learner import learner_server
from diloco_node.daemon.learner.learner_server import LearnerServer
from diloco_node.errors import BindError, ProtocolViolation
from diloco_node.unix_sockets import Process, process_of
from diloco_node.wire.learner_link import (
    FRAME_BYTES_MAX,
    LENGTH_BYTES,
    LINK_PROTOCOL,
    TO_DAEMON,
    TO_LEARNER,
    Attach,
    Failed,
    InitialState,
    Refuse,
    Report,
    Stop,
    ToDaemon,
    ToLearner,
    VersionOffered,
    frame,
    frame_length,
    merge_rules,
)

ATTACH = Attach(LINK_PROTOCOL, 17, (TensorSpec("w", (3,)),), 0, "", 0, 0, 0, (), ())
REPORT = Report(1, 8, 2.5, 1000, 7, None, None, 1, None)


class Daemon:
    """Records what the server calls, in order."""

    def __init__(self) -> None:
        self.calls: list[object] = []
        self.changed = asyncio.Event()
        self.refuses: set[int] = set()
        self.processes: list[Process | None] = []

    def rejection_reason(self, attach: Attach, process: Process | None) -> str:
        self.processes.append(process)
        return "there is a newer one" if attach.incarnation in self.refuses else ""

    def on_learner_message(self, message: ToDaemon) -> None:
        self._note(message)

    def learner_detached(self, reason: str) -> None:
        self._note(f"detached: {reason}")

    def _note(self, record: object) -> None:
        self.calls.append(record)
        self.changed.set()

    async def wait_for(self, count: int) -> list[object]:
        async with asyncio.timeout(120):
            while len(self.calls) < count:
                self.changed.clear()
                await self.changed.wait()
        return self.calls


class Learner:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def say(self, *messages: ToDaemon) -> None:
        self.writer.write(b"".join(frame(TO_DAEMON.encode(message)) for message in messages))

    async def hear(self) -> ToLearner:
        async with asyncio.timeout(120):
            length = frame_length(await self.reader.readexactly(LENGTH_BYTES))
            return TO_LEARNER.decode(await self.reader.readexactly(length))

    async def is_hung_up(self) -> bool:
        async with asyncio.timeout(120):
            return await self.reader.read(1) == b""

    def leave(self) -> None:
        self.writer.close()


@asynccontextmanager
async def serving(tmp_path: Path) -> AsyncIterator[tuple[LearnerServer, Daemon]]:
    daemon = Daemon()
    server = LearnerServer(tmp_path / "l.sock", daemon)
    await server.start()
    try:
        yield server, daemon
    finally:
        await server.stop()


async def dial(server: LearnerServer) -> Learner:
    return Learner(*await asyncio.open_unix_connection(server.path))


async def test_messages_arrive_in_order_and_answers_go_back(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, daemon):
        learner = await dial(server)
        assert not server.is_attached
        assert not server.send(Stop("nobody is there"))
        learner.say(ATTACH, InitialState(), REPORT)
        assert await daemon.wait_for(3) == [ATTACH, InitialState(), REPORT]
        assert server.is_attached
        assert server.send(VersionOffered(0, 1, -1))
        assert server.send(Stop("finished"))
        assert [await learner.hear(), await learner.hear()] == [VersionOffered(0, 1, -1), Stop("finished")]
        learner.leave()
        assert (await daemon.wait_for(4))[3] == "detached: the learner is gone (IncompleteReadError)"
        assert not server.is_attached


async def test_newer_process_takes_the_place_of_the_older(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, daemon):
        older, newer = await dial(server), await dial(server)
        older.say(ATTACH)
        await daemon.wait_for(1)
        newer.say(ATTACH)
        calls = await daemon.wait_for(3)
        assert calls == [ATTACH, "detached: a newer learner process (pid 17) has attached to this region", ATTACH]
        message = await older.hear()
        assert isinstance(message, Refuse)
        assert message.is_final
        assert await older.is_hung_up()
        older.leave()
        newer.say(REPORT)
        assert (await daemon.wait_for(4))[3] == REPORT  # the older one's end is no detachment
        server.send(Stop("x"))
        assert await newer.hear() == Stop("x")
        newer.leave()
        await daemon.wait_for(5)


async def test_a_process_that_is_objected_to_leaves_the_attached_one_in_place(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, daemon):
        daemon.refuses.add(5)
        newer, older = await dial(server), await dial(server)
        newer.say(ATTACH)
        await daemon.wait_for(1)
        older.say(replace(ATTACH, incarnation=5))
        assert await older.hear() == Refuse("there is a newer one", True)
        assert await older.is_hung_up()
        newer.say(REPORT)
        assert await daemon.wait_for(2) == [ATTACH, REPORT]
        assert daemon.processes == [process_of(os.getpid())] * 2
        older.leave()
        newer.leave()
        await daemon.wait_for(3)


async def test_refused_learner_is_told_why_and_hung_up_on(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, daemon):
        learner = await dial(server)
        learner.say(ATTACH)
        await daemon.wait_for(1)
        server.refuse("another model", is_final=True)
        assert await learner.hear() == Refuse("another model", True)
        assert await learner.is_hung_up()
        assert daemon.calls == [ATTACH, "detached: another model"]
        learner.leave()


async def test_another_protocol_is_refused_for_good(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, daemon):
        learner = await dial(server)
        learner.say(Attach(LINK_PROTOCOL + 1, 17, ATTACH.tensors, 0, "", 0, 0, 0, (), ()))
        message = await learner.hear()
        assert isinstance(message, Refuse)
        assert message.is_final
        assert "install one version" in message.reason
        assert await learner.is_hung_up()
        assert daemon.calls == []
        learner.leave()


@pytest.mark.parametrize(
    "garbage",
    [
        frame(TO_DAEMON.encode(REPORT)),  # before Attach
        frame(b"\xc1"),
        (FRAME_BYTES_MAX + 1).to_bytes(4, "little") + b"x",
        (0).to_bytes(4, "little"),
        frame(TO_DAEMON.encode(ATTACH)) * 2,
        frame(TO_DAEMON.encode(ATTACH)) + frame(b"\x91\x63"),
    ],
)
async def test_violation_hangs_up_and_the_server_lives_on(tmp_path: Path, garbage: bytes) -> None:
    async with serving(tmp_path) as (server, daemon):
        learner = await dial(server)
        learner.writer.write(garbage)
        message = await learner.hear()
        assert isinstance(message, Refuse)
        assert not message.is_final
        assert await learner.is_hung_up()
        learner.leave()
        calls_before = len(daemon.calls)
        again = await dial(server)
        again.say(ATTACH)
        assert (await daemon.wait_for(calls_before + 1))[-1] == ATTACH
        again.leave()
        await daemon.wait_for(calls_before + 2)


async def test_silent_connection_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_server, "ATTACH_TIMEOUT_S", 0.01)
    async with serving(tmp_path) as (server, _daemon):
        learner = await dial(server)
        assert isinstance(await learner.hear(), Refuse)
        learner.leave()


async def test_process_of_another_user_is_not_listened_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_server, "peer_uid", lambda _connection: os.getuid() + 1)
    async with serving(tmp_path) as (server, daemon):
        learner = await dial(server)
        learner.say(ATTACH)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await learner.hear()
        assert daemon.calls == []
        learner.leave()


async def test_learner_that_does_not_read_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_server, "UNSENT_BYTES_MAX", 4096)
    async with serving(tmp_path) as (server, daemon):
        learner = await dial(server)
        learner.say(ATTACH)
        await daemon.wait_for(1)
        count = 0
        while server.send(Stop("x" * 4000)):
            count += 1
            assert count < 10_000
        await daemon.wait_for(2)
        assert not server.is_attached
        learner.leave()


async def test_number_of_connections_is_bounded(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, _daemon):
        silent = [await dial(server) for _ in range(learner_server.CONNECTIONS_MAX)]
        one_more = await dial(server)
        assert await one_more.is_hung_up()
        for learner in [*silent, one_more]:
            learner.leave()


async def test_stop_hangs_up_and_leaves_the_socket_of_the_next_daemon(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, daemon):
        assert server.path.stat().st_mode & 0o777 == 0o600
        learner = await dial(server)
        learner.say(ATTACH)
        await daemon.wait_for(1)
        server.path.unlink()
        server.path.write_text("of the next one, in a folder that was emptied")
        await server.stop()
        assert await learner.is_hung_up()
        assert daemon.calls[1] == "detached: the daemon stops"
        assert server.path.exists()
        learner.leave()


async def test_path_that_can_not_be_bound_is_named(tmp_path: Path) -> None:
    with pytest.raises(BindError, match="no-such-folder"):
        await LearnerServer(tmp_path / "no-such-folder" / "l.sock", Daemon()).start()


# ---- messages --------------------------------------------------------------------------------------------------------


def test_new_process_stands_at_minus_one_everywhere() -> None:
    whole = ATTACH.in_fragments(3)
    assert whole.positions == (FragmentPosition(-1, 0, 0, 0),) * 3
    assert whole.snapshots == (-1, -1, -1)
    assert whole.in_fragments(3) == whole


def test_known_learner_with_another_number_of_fragments_is_refused() -> None:
    attach = Attach(
        LINK_PROTOCOL, 17, ATTACH.tensors, 4, "run", 9, 90, 5, (FragmentPosition(0, 0, 0, 0),) * 2, (-1, -1)
    )
    assert attach.in_fragments(2) == attach
    with pytest.raises(ProtocolViolation, match="expected 3"):
        attach.in_fragments(3)
    with pytest.raises(ProtocolViolation, match="expected 3"):
        Attach(LINK_PROTOCOL, 17, ATTACH.tensors, 4, "run", 9, 90, 5, (), ()).in_fragments(3)


def test_runs_rule_is_for_what_is_neither_embedding_nor_head() -> None:
    specs = (TensorSpec("a", (1,), MergeRule.RDA), TensorSpec("b", (1,), MergeRule.AVG))
    assert merge_rules(specs, MergeRule.RDA) == specs
    assert [spec.merge for spec in merge_rules(specs, MergeRule.AVG)] == [MergeRule.AVG, MergeRule.AVG]


@pytest.mark.parametrize("slots", [(0, 5), (0, 1, 2, 3)])
def test_slots_that_no_version_area_has_are_refused(slots: tuple[int, ...]) -> None:
    attach = replace(
        ATTACH, incarnation=4, positions=(FragmentPosition(0, 0, 0, 0),) * 3, snapshots=(-1,) * 3, slots=slots
    )
    with pytest.raises(ProtocolViolation, match="slots"):
        attach.in_fragments(3)
    assert replace(attach, slots=(4, -1, 0)).in_fragments(3)


def test_old_bytes_are_still_understood() -> None:
    assert TO_DAEMON.encode(Failed("x")).hex() == "9208a178"
    assert TO_LEARNER.encode(VersionOffered(1, 2, -1)).hex() == "96040102ffc2ff"
    assert TO_DAEMON.decode(bytes.fromhex("9a02010ccb40040000000000000507c0c001c0")) == Report(
        1, 12, 2.5, 5, 7, None, None, 1, None
    )

"""The control socket: commands in, answers out, and clients that misbehave."""

import contextlib
import json
import select
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco_node.errors import ConfigError, PeersUnreachable
from diloco_node.lab.wan import control
from diloco_node.lab.wan.control import ControlServer, request, scope_of
from diloco_node.lab.wan.topology import Scope


class Served:
    """A server in its select loop on a thread, as the keeper runs it."""

    def __init__(self, path: Path) -> None:
        self.seen: list[dict[str, Any]] = []
        self.server = ControlServer(path, self.handle)
        self.is_ending = False
        self.thread = threading.Thread(target=self.loop)
        self.thread.start()

    def handle(self, command: dict[str, Any]) -> dict[str, Any]:
        self.seen.append(command)
        if command.get("do") == "refuse":
            raise ConfigError("not that one")
        if command.get("do") == "end":
            self.is_ending = True
        return {"echo": command.get("text", "")}

    def loop(self) -> None:
        while not self.is_ending:
            ready, _, _ = select.select(self.server.sockets, [], [], 5)
            for sock in ready:
                self.server.serve(sock)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control.sock"


@pytest.fixture
def served(path: Path) -> Iterator[Served]:
    one = Served(path)
    yield one
    with contextlib.suppress(PeersUnreachable):
        request(path, {"do": "end"})
    one.thread.join(120)
    one.server.close()
    assert not path.exists()


def raw(path: Path, data: bytes, lines: int = 1) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(120)
        sock.connect(str(path))
        sock.sendall(data)
        with sock.makefile("rb") as file:
            return b"".join(file.readline() for _ in range(lines))


def test_a_command_gets_its_answer_and_a_refusal_is_an_error(served: Served, path: Path) -> None:
    assert request(path, {"do": "x", "text": "hello"}) == {"echo": "hello"}
    with pytest.raises(ConfigError, match="not that one"):
        request(path, {"do": "refuse"})
    assert path.stat().st_mode & 0o077 == 0


def test_garbage_is_answered_and_the_next_client_is_served(served: Served, path: Path) -> None:
    assert json.loads(raw(path, b"{nonsense\n"))["ok"] is False
    assert json.loads(raw(path, b"[" * 100_000 + b"\n"))["ok"] is False
    assert json.loads(raw(path, b"[1]\n"))["error"] == "a command is a JSON object"
    assert request(path, {"text": "still here"}) == {"echo": "still here"}


def test_a_line_without_end_is_cut_off_at_the_limit(
    served: Served, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "LINE_BYTES_MAX", 1000)
    with contextlib.suppress(ConnectionError):
        assert raw(path, b"x" * 2000) == b""
    assert served.seen == []


def test_silent_clients_do_not_hold_up_the_others_and_are_bounded(served: Served, path: Path) -> None:
    with contextlib.ExitStack() as silent:
        for _ in range(control.CONNECTIONS_MAX + 5):
            sock = silent.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.connect(str(path))
            with contextlib.suppress(BrokenPipeError):  # one too many, and turned away already
                sock.sendall(b'{"half": ')
        assert request(path, {"text": "me"}) == {"echo": "me"}
        assert len(served.server.sockets) <= control.CONNECTIONS_MAX + 2


def test_a_full_queue_is_waited_for(path: Path) -> None:
    server, over = ControlServer(path, lambda _: {"echo": "me"}), threading.Event()

    def serve() -> None:
        while not over.is_set():
            for sock in select.select(server.sockets, [], [], 0.1)[0]:
                server.serve(sock)

    with contextlib.ExitStack() as waiting:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock = waiting.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                sock.setblocking(False)
                sock.connect(str(path))
        thread = threading.Timer(0.5, serve)
        thread.start()
        try:
            assert request(path, {"text": "me"}) == {"echo": "me"}
        finally:
            over.set()
            thread.join()
            server.close()


def test_two_commands_in_one_write_are_two_commands(served: Served, path: Path) -> None:
    answers = raw(path, b'{"text": "a"}\n{"text": "b"}\n', lines=2)
    assert [json.loads(line)["echo"] for line in answers.splitlines()] == ["a", "b"]


def test_nobody_there_is_one_clear_error(path: Path) -> None:
    with pytest.raises(PeersUnreachable, match=f"does not answer .* diloco-node wan down {path.stem}$"):
        request(path, {"do": "status"})


def test_a_stale_socket_is_replaced(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stale:
        stale.bind(str(path))
    server = ControlServer(path, lambda command: {})
    server.close()


def test_scopes_are_read_and_checked() -> None:
    assert scope_of({"region": "a", "other": "b", "direction": "in"}) == Scope("a", "b", "in")
    assert scope_of({"region": "a"}) == Scope("a")
    for wrong in ({}, {"region": 3}, {"region": "a", "direction": "up"}, {"region": "a", "other": "a"}):
        with pytest.raises(ConfigError):
            scope_of(wrong)

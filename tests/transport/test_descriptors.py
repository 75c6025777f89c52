"""A flood of connections leaves the process descriptors for its own files. In a process that may have few of them."""

import contextlib
import resource
import select
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from diloco_node.transport import streams
from diloco_node.transport.authority import init_run
from diloco_node.transport.certificates import tls_name

LIMIT = 256
SERVER = """
import asyncio, resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]),) * 2)
from concurrent.futures import ThreadPoolExecutor
from tests.kit.transport_kit import FAST, RUN, Recorder
from diloco_node.transport.certificates import load_identity
from diloco_node.transport.transport import GrpcTransport

async def main():
    folder = Path(sys.argv[1])
    transport = GrpcTransport(
        region="b", run_id=RUN, settings_digest="s", manifest_digest="m",
        identity=load_identity(folder / "run" / "b"), listen=("127.0.0.1", 0), peers={"a": None}, handler=Recorder(),
        executor=ThreadPoolExecutor(1), times=FAST,
    )
    await transport.start()
    print("port", transport.port, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        try:
            files = [(folder / f"payload-{number}").open("wb") for number in range(40)]
            print("written", len(list(Path("/proc/self/fd").iterdir())), flush=True)
            del files
        except OSError as error:
            print("written", error.strerror, flush=True)
    await transport.stop()

asyncio.run(main())
"""


def told(lines: IO[str], word: str) -> str:
    """What follows a word at the beginning of a line; other lines are the log's."""
    return next(line.removeprefix(word).strip() for line in lines if line.startswith(word))


def shakes_hands(port: int, identity: Path) -> bool:
    """Whether a peer gets through TLS; the server may need a moment to see that others are gone."""
    context = ssl.create_default_context(cafile=str(identity / "ca.pem"))
    context.load_cert_chain(identity / "node.pem", identity / "node.key")
    context.set_alpn_protocols(["h2"])
    for _ in range(10_000):
        with (
            contextlib.suppress(ConnectionError, ssl.SSLEOFError),
            socket.create_connection(("127.0.0.1", port), timeout=60) as plain,
            context.wrap_socket(plain, server_hostname=tls_name("b", "run1")) as secure,
        ):
            return secure.version() is not None
    return False


def test_payloads_are_written_while_a_flood_of_connections_stands(tmp_path: Path) -> None:
    init_run(tmp_path / "run", "run1", ["a", "b"])
    command = [sys.executable, "-c", SERVER, str(tmp_path), str(LIMIT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        port = int(told(server.stdout, "port"))
        with contextlib.ExitStack() as held:
            flood = [held.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(LIMIT + 100)]
            # Who is one too many is closed at once; what is within the limit stays for its handshake time of a minute.
            closed, _, _ = select.select(flood, [], [], 30)
            assert closed, "no connection is refused: they take every descriptor"
            server.stdin.write("write\n")
            server.stdin.flush()
            assert int(told(server.stdout, "written")) <= LIMIT
        assert shakes_hands(port, tmp_path / "run" / "a"), "when the flood is over the port is there again"
        server.stdin.close()


def test_half_of_the_descriptors_are_for_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, allowed in ((256, 128), (1024, 512), (4096, 1024), (65_536, 1024)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert streams.connections_max() == allowed

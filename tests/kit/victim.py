"""A region's listener in a process of its own, for tests that attack it: memory and descriptors are its own.

The child answers each line on its standard input with a JSON object; see `Facts`. It sends every control message of
region a back, and a message for each transfer that arrived whole.
"""

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import traceback
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_node.core.messages import BulkHeader, Message, RequestVoteReply
from diloco_node.daemon.process_setup import keep_freed_memory
from diloco_node.transport.certificates import load_identity
from diloco_node.transport.transport import GrpcTransport
from tests.kit.repository import ROOT
from tests.kit.transport_kit import DEADLINE_S, FAST, RUN, Recorder

HELLO_S = 2.0
SILENT_S = 10.0
WHOLE = RequestVoteReply(2**40, False, True, b"")
"""The answer to a transfer that arrived whole."""


@dataclass(frozen=True)
class Facts:
    """What the victim knows of itself.

    Attributes:
        calls: of peers, that were handed to our code since its start. handled: those that it has not ended.
        tasks: of asyncio, now.
        descriptors: that are open now. memory_bytes: resident now.
        up: regions with a link. rejections: what was refused, "peer reason".
        faults: exceptions in our code that nobody caught. gRPC's own it survives, or `transport.listener` sees to it.
    """

    calls: int
    handled: int
    tasks: int
    descriptors: int
    memory_bytes: int
    up: list[str]
    rejections: dict[str, int]
    faults: int


class Victim:
    """The parent's end."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.port = 0

    async def facts(self) -> Facts:
        """As they are now."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"facts\n")
        return Facts(**json.loads(await self._told("facts")))

    async def _told(self, word: str) -> str:
        """What follows a word at the beginning of a line; other lines are the log's."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            while line := (await self.process.stdout.readline()).decode():
                if line.startswith(f"{word} "):
                    return line.removeprefix(word).strip()
        raise AssertionError(f"the victim has ended, code {await self.process.wait()}")

    async def started(self) -> None:
        """Wait until it listens."""
        self.port = int(await self._told("port"))


@contextlib.asynccontextmanager
async def victim(folder: Path) -> AsyncIterator[Victim]:
    """Region b of the run in `folder`, with peers a and c that dial it. It ends with its standard input."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.kit.victim", str(folder)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    made = Victim(process)
    try:
        await made.started()
        yield made
        assert process.returncode is None, "it must outlive what is done to it"
    finally:
        assert process.stdin is not None
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEADLINE_S):
                await process.communicate()
        if process.returncode is None:
            process.kill()
            await process.wait()


# ---- the child -------------------------------------------------------------------------------------------------------


class _Echo(Recorder):
    def __init__(self) -> None:
        super().__init__()
        self.transport: GrpcTransport | None = None

    def control_arrived(self, peer: str, message: Message) -> None:
        assert self.transport is not None
        if peer == "a":
            self.transport.send(peer, message)

    def transfer_opened(self, peer: str, header: BulkHeader, raw_bytes: int) -> memoryview | None:
        return memoryview(bytearray(raw_bytes))

    def transfer_closed(self, peer: str, header: BulkHeader, buffer: memoryview, *, is_whole: bool) -> None:
        assert self.transport is not None
        if peer == "a" and is_whole:
            self.transport.send(peer, WHOLE)


class _Counting(GrpcTransport):
    calls = 0

    handled = 0

    async def _serve(self, lane: Any, context: Any) -> None:
        self.calls += 1
        self.handled += 1
        try:
            await super()._serve(lane, context)
        finally:
            self.handled -= 1


def _is_ours(context: dict[str, Any]) -> bool:
    """Whether our code is on the way that the exception took."""
    error = context.get("exception")
    where = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)] if error else [""]
    return error is None or any("diloco_node" in name for name in where)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _main(folder: Path) -> None:
    handler, faults = _Echo(), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: faults.append(context) if _is_ours(context) else None
    )
    transport = _Counting(
        region="b",
        run_id=RUN,
        settings_digest="settings",
        manifest_digest="manifest",
        identity=load_identity(folder / "run" / "b"),
        listen=("127.0.0.1", 0),
        peers={"a": None, "c": None},
        handler=handler,
        executor=ThreadPoolExecutor(2),
        times=dataclasses.replace(FAST, handshake_s=HELLO_S, hello_s=HELLO_S, silent_s=SILENT_S),
    )
    handler.transport = transport
    await transport.start()
    print("port", transport.port, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        facts = Facts(
            calls=transport.calls,
            handled=transport.handled,
            tasks=len(asyncio.all_tasks()),
            descriptors=len(os.listdir("/proc/self/fd")),  # noqa: PTH208 - a name each is enough
            memory_bytes=_resident_bytes(),
            up=sorted(peer for peer, is_up in handler.is_up.items() if is_up),
            rejections={f"{peer} {reason}": count for (peer, reason), count in transport.rejections.items()},
            faults=len(faults),
        )
        print("facts", json.dumps(dataclasses.asdict(facts)), flush=True)
        for context in faults:
            print(context, file=sys.stderr)
    await transport.stop()


if __name__ == "__main__":
    keep_freed_memory()  # as a daemon does: memory of the C library is counted, too
    asyncio.run(_main(Path(sys.argv[1])))

"""The learner's end of the Unix socket: one thread that keeps a conversation with whichever daemon is alive.

The training thread never waits for it. `send` puts a message into a bounded queue, newer reports replace older ones;
`commands` yields what the daemon said. When the daemon dies the thread dials until there is another, and says where the
learner stands with an `Attach` made under `lock`. From then on the old daemon's requests are void: its offers point
to places in the version area that the new daemon may write again. Therefore the training thread holds `lock` while
it carries out a command.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from diloco_node.backoff import Backoff
from diloco_node.errors import DilocoError, LearnerError, LinkLost, ProtocolViolation
from diloco_node.shared_memory import PLACE_AREA, PLACE_BYTES, area_inode
from diloco_node.wire.learner_link import (
    TO_DAEMON,
    TO_LEARNER,
    Attach,
    Refuse,
    Report,
    ToDaemon,
    ToLearner,
    Welcome,
    frame,
    take_frames,
)

QUEUE_MAX: Final = 8192
"""Messages in either direction; two per fragment and round are normal. Beyond, the connection is made anew."""

REDIAL_MIN_S: Final = 0.02
REDIAL_MAX_S: Final = 0.5
"""The daemon is on this machine and dialling is cheap: a new one should be found at once."""

REFUSED_WAIT_S: Final = 1.0
SEND_TIMEOUT_S: Final = 20.0
_RECEIVE_BYTES: Final = 256 * 1024

log = logging.getLogger("diloco_node.learner")


def check_memory(path: Path, inode: int) -> None:
    """Compare the memory that a daemon shares now with this learner's: it would merge what lies in its own.

    Raises LearnerError: it is another one. LinkLost: the supervisor does not answer.
    """
    try:
        is_same = area_inode(path, PLACE_AREA, PLACE_BYTES) == inode
    except LearnerError as error:
        raise LinkLost(str(error)) from error
    if not is_same:
        raise LearnerError(
            f"this learner's supervisor is gone, and the daemon that is here now shares the memory of another "
            f"({path}): end this process; what started the region starts its learner"
        )


class LearnerLink:
    """The thread that keeps the learner's conversation with its daemon.

    make_attach: builds the Attach; called in the link's thread, with `lock` held. Its LearnerError is final.

    Attributes:
        lock: held by the link while it starts a conversation, by the training thread while it carries out a command.
        is_up: a daemon has answered Welcome on the present connection.
    """

    def __init__(self, path: Path, make_attach: Callable[[], Attach]) -> None:
        self.lock = threading.RLock()  # a signal's handler may save the model in the middle of a boundary
        self.is_up = False
        self._path = path
        self._make_attach = make_attach
        # Of the present daemon, oldest first; changed with `lock` held.
        self.waiting_commands: deque[ToLearner] = deque()
        # The training and the encoder's thread append, the link's thread takes, each with the lock for a moment.
        self._outgoing: list[ToDaemon] = []
        self._queue_lock = threading.RLock()
        # Why a daemon refused this learner for now, the last time.
        self._refusal = ""
        # Set once, by the link's thread, which then ends; the training thread raises it.
        self._failure: LearnerError | None = None
        # Set while there is a command or a failure that the training thread has not seen.
        self._arrived = threading.Event()
        self._is_closing = threading.Event()
        # A byte in it wakes the link's thread; a full pipe means that it is awake.
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="diloco-link", daemon=True)
        self._thread.start()

    def send(self, message: ToDaemon) -> None:
        """Queue a message; they arrive in the order of the calls, and of reports in a row the newest alone.

        Never blocks. Lost if the daemon dies: the next Attach says what matters.
        """
        with self._queue_lock:
            last = len(self._outgoing) - 1  # read once: a signal's handler may send in the midst of this
            if isinstance(message, Report) and last >= 0 and isinstance(self._outgoing[last], Report):
                self._outgoing[last] = message  # an older one that was not sent is of no use
            else:
                self._outgoing.append(message)
        self._wake()

    @property
    def may_have_commands(self) -> bool:
        """Whether `commands` may yield or raise something; without the lock, which a boundary without any spares."""
        return bool(self.waiting_commands) or self._arrived.is_set() or self._failure is not None

    def commands(self) -> Iterator[ToLearner]:
        """Return the daemon's commands since the last time, with `lock` held. Raises LearnerError: refused for good."""
        self._arrived.clear()
        if self._failure is not None:
            raise self._failure
        # Only what is there now: what arrives meanwhile waits for the next boundary.
        for _ in range(len(self.waiting_commands)):
            yield self.waiting_commands.popleft()

    def put_back(self, *commands: ToLearner) -> None:
        """Keep commands for the next boundary, in this order, before those that come. Call it once within the boundary
        that yielded them, with `lock` held since."""
        self.waiting_commands.extendleft(reversed(commands))

    def wait(self, timeout_s: float) -> bool:
        """Wait for a command; for who has nothing else to do. True if there may be one."""
        return self._arrived.wait(timeout_s)

    def close(self, flush_s: float) -> None:
        """Send what is queued, if a daemon is there, for at most `flush_s` seconds; then end the thread."""
        deadline_s = time.monotonic() + flush_s
        while self.is_up and self.has_outgoing() and time.monotonic() < deadline_s:
            time.sleep(0.005)
        self._is_closing.set()
        self._wake()
        self._thread.join(SEND_TIMEOUT_S + 1.0)
        self._wake_read.close()
        self._wake_write.close()

    def has_outgoing(self) -> bool:
        """Whether something waits for the link to be sent."""
        return bool(self._outgoing)

    def _wake(self) -> None:
        # A full pipe means that the thread is awake already.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_write.send(b"\0")

    def _run(self) -> None:
        backoff = Backoff(REDIAL_MIN_S, REDIAL_MAX_S)
        while not self._is_closing.is_set():
            try:
                with socket.socket(socket.AF_UNIX) as connection:
                    connection.settimeout(SEND_TIMEOUT_S)
                    connection.connect(os.fspath(self._path))
                    self._converse(connection)
            except LearnerError as error:  # no daemon that comes can be this learner's
                self._failure = error
            except (OSError, DilocoError) as error:
                if self.is_up:
                    log.warning("daemon lost (%s): training goes on, looking for the next one", error)
                    backoff.reset()
            except Exception as error:  # noqa: BLE001 - a thread's last word; the training thread raises it
                self._failure = LearnerError(f"the link thread ended: {error!r}")
            self.is_up = False
            if self._failure is not None:
                self._arrived.set()
                return
            self._is_closing.wait(backoff.next_s())

    def _converse(self, connection: socket.socket) -> None:
        with self.lock:
            self.waiting_commands.clear()
            with self._queue_lock:  # another daemon knows nothing of it; where the learner stands it hears all the same
                reports: list[ToDaemon] = [message for message in self._outgoing if isinstance(message, Report)]
                self._outgoing = reports[-1:]
            attach = self._make_attach()
        connection.sendall(frame(TO_DAEMON.encode(attach)))
        buffer = bytearray()
        while not self._is_closing.is_set():
            readable, _, _ = select.select([connection, self._wake_read], [], [])
            if connection in readable:
                data = connection.recv(_RECEIVE_BYTES)
                if not data:
                    raise LinkLost("the daemon closed the connection")
                buffer += data
                self._receive(buffer)
            if self._wake_read in readable:
                with contextlib.suppress(BlockingIOError):
                    self._wake_read.recv(4096)
            if self.is_up:
                self._send_queued(connection)

    def _receive(self, buffer: bytearray) -> None:
        for body in take_frames(buffer):
            message = TO_LEARNER.decode(body)
            if isinstance(message, Refuse):
                self._refused(message)
            if not self.is_up and not isinstance(message, Welcome):
                raise ProtocolViolation(f"learner link: {type(message).__name__} before Welcome")
            if len(self.waiting_commands) >= QUEUE_MAX:
                raise LinkLost(f"{QUEUE_MAX} commands wait for a step boundary; attaching anew")
            self.is_up = True
            self.waiting_commands.append(message)
            self._arrived.set()

    def _refused(self, message: Refuse) -> None:
        if message.is_final:
            self._failure = LearnerError(f"the daemon refused this learner: {message.reason}")
        else:
            if message.reason != self._refusal:  # it may be the same for hours
                log.warning("the daemon refused this learner for now: %s", message.reason)
            self._refusal = message.reason
            self._is_closing.wait(REFUSED_WAIT_S)
        raise LinkLost(message.reason)

    def _send_queued(self, connection: socket.socket) -> None:
        with self._queue_lock:
            if len(self._outgoing) > QUEUE_MAX:
                raise LinkLost(f"the daemon has left {QUEUE_MAX} messages unread; attaching anew")
            messages, self._outgoing = self._outgoing, []
        if messages:
            connection.sendall(b"".join(frame(TO_DAEMON.encode(message)) for message in messages))

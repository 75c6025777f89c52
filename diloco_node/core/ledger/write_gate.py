"""The gate between a voter's messages and its disk: no term or vote is sent before it is on disk."""

from __future__ import annotations

from typing import Final

from diloco_node.core.events import Effect, Note, Send
from diloco_node.core.ledger.log import ReplicaLog
from diloco_node.core.messages import Message

PENDING_MESSAGES_MAX: Final = 1024
"""Messages that wait for a term or vote to be on disk; the oldest are dropped beyond it, as the network might."""


class WriteGate:
    """The ledger's messages and notes of one event; `flush` turns them into effects, with one write if one is due.

    A message may name the newest term (each does) or vote, so all wait while a write of term or vote is under way.
    """

    def __init__(self) -> None:
        self._token = 0
        self._persisted_token = 0
        # Of the write that has the newest term and vote, done or to come.
        self._hard_token = 0
        self._pending: list[Send] = []
        self._notes: list[Note] = []

    @property
    def is_hard_durable(self) -> bool:
        """Term and vote are on disk as they are now."""
        return self._hard_token <= self._persisted_token

    def change_hard_state(self) -> None:
        """Term or vote have changed."""
        self._hard_token = self._token + 1

    def on_persisted(self, token: int) -> None:
        """The write is done, and all before it."""
        self._persisted_token = max(self._persisted_token, token)

    def send(self, peer: str, message: Message) -> None:
        """Send this, as soon as it may leave."""
        self._pending.append(Send(peer, message))

    def note(self, text: str, *, is_alarm: bool = False) -> None:
        """Tell the operator."""
        self._notes.append(Note("ledger", text, is_alarm=is_alarm))

    def flush(self, log: ReplicaLog, *, term: int, voted_for: str) -> list[Effect]:
        """Notes, one write if something changed, and the messages that may leave."""
        effects: list[Effect] = list(self._notes)
        self._notes.clear()
        if self._hard_token > self._token or log.is_dirty:
            self._token += 1
            effects.append(log.take_change(self._token, term, voted_for))
        if self.is_hard_durable:
            effects += self._pending
            self._pending.clear()
        else:
            del self._pending[:-PENDING_MESSAGES_MAX]
        return effects

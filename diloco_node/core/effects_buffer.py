"""Where the parts of the region core put what is to be done; the region hands it out in one list per event."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from diloco_node.core.events import Effect, Note, Send
from diloco_node.core.messages import Message


class EffectBuffer:
    """Effects in the order in which they were decided, and messages of this region to itself (`local`)."""

    def __init__(self, region: str) -> None:
        self.local: deque[Message] = deque()
        self._region = region
        self._effects: list[Effect] = []
        self._last_noted: dict[str, str] = {}

    def emit(self, effect: Effect) -> None:
        """Add an effect."""
        self._effects.append(effect)

    def send(self, peer: str, message: Message) -> None:
        """Send a message to a region; to itself without the network."""
        if peer == self._region:
            self.local.append(message)
        else:
            self._effects.append(Send(peer, message))

    def send_all(self, peers: Iterable[str], message: Message) -> None:
        """Send a message to each of these regions."""
        for peer in peers:
            self.send(peer, message)

    def note(self, kind: str, text: str, *, fragment: int = -1, version: int = -1, is_alarm: bool = False) -> None:
        """Add a line that says why."""
        self._effects.append(Note(kind, text, fragment, version, is_alarm))

    def note_change(self, topic: str, state: str, text: str) -> None:
        """Add a line only when the state of its topic has changed.

        topic: few and fixed, for each is remembered; also the kind of the note. state: `text` without its changing
        numbers; empty: the topic is closed.
        """
        if self._last_noted.get(topic, "") == state:
            return
        self._last_noted[topic] = state
        if state:
            self.note(topic, text)

    def take(self) -> list[Effect]:
        """Everything since the last call, in order."""
        effects, self._effects = self._effects, []
        return effects

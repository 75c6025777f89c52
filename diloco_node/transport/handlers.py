"""Hands what arrives on links to the handler that takes its kind."""

from __future__ import annotations

from typing import Any

from diloco_node.core.messages import BulkHeader, Message
from diloco_node.transport.inbound import TransportHandler
from diloco_node.wire.message_tables import ControlMessage, TransferHeader


class Handlers:
    """Hands what arrives to who takes its kind; implements `TransportHandler` for all that is on the wire."""

    def __init__(self, handler: TransportHandler[Message, BulkHeader]) -> None:
        self._handler: TransportHandler[Any, Any] = handler
        self._registered: dict[type, TransportHandler[Any, Any]] = {}

    def register(self, handler: TransportHandler[Any, Any], kinds: frozenset[type]) -> None:
        """Have another handler take some kinds."""
        self._registered |= dict.fromkeys(kinds, handler)

    def control_arrived(self, peer: str, message: ControlMessage) -> None:
        """See `TransportHandler`."""
        self._registered.get(type(message), self._handler).control_arrived(peer, message)

    def link_changed(self, peer: str, *, is_up: bool) -> None:
        """See `TransportHandler`."""
        for handler in dict.fromkeys((self._handler, *self._registered.values())):
            handler.link_changed(peer, is_up=is_up)

    def transfer_opened(self, peer: str, header: TransferHeader, raw_bytes: int) -> memoryview | None:
        """See `TransportHandler`."""
        return self._registered.get(type(header), self._handler).transfer_opened(peer, header, raw_bytes)

    def transfer_closed(self, peer: str, header: TransferHeader, buffer: memoryview, *, is_whole: bool) -> None:
        """See `TransportHandler`."""
        handler = self._registered.get(type(header), self._handler)
        handler.transfer_closed(peer, header, buffer, is_whole=is_whole)

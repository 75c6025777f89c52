"""The outbox: order, messages to itself, and reasons that are said once."""

from __future__ import annotations

from diloco_node.core.effects_buffer import Outbox
from diloco_node.core.events import Note, Send, WriteFinal
from diloco_node.core.messages import FinishWanted


def test_effects_keep_their_order_and_are_handed_out_once() -> None:
    outbox = Outbox("a")
    outbox.emit(WriteFinal((1,)))
    outbox.send("b", FinishWanted("x"))
    outbox.note("why", "because", fragment=2, version=3, is_alarm=True)
    assert outbox.take() == [WriteFinal((1,)), Send("b", FinishWanted("x")), Note("why", "because", 2, 3, True)]
    assert outbox.take() == []


def test_message_to_itself_stays_inside() -> None:
    outbox = Outbox("a")
    outbox.send("a", FinishWanted("x"))
    assert outbox.take() == []
    assert list(outbox.local) == [FinishWanted("x")]


def test_reason_is_said_when_it_changes() -> None:
    outbox = Outbox("a")
    for said in ("quorum", "quorum", "grace", "quorum", "", "", "quorum"):
        outbox.note_change("waits", said, f"{said}!", fragment=1)
    outbox.note_change("waits", "quorum", "other fragment", fragment=2)
    texts = [effect.text for effect in outbox.take() if isinstance(effect, Note)]
    assert texts == ["quorum!", "grace!", "quorum!", "quorum!", "other fragment"]

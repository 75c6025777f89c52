"""The effect buffer: order, messages to itself, and reasons that are said once."""

from diloco_node.core.effects_buffer import EffectBuffer
from diloco_node.core.events import Note, Send, WriteFinal
from diloco_node.core.messages import FinishRequested


def test_effects_keep_their_order_and_are_handed_out_once() -> None:
    effects = EffectBuffer("a")
    effects.emit(WriteFinal())
    effects.send("b", FinishRequested("x"))
    effects.note("why", "because", fragment=2, version=3, is_alarm=True)
    assert effects.take() == [WriteFinal(), Send("b", FinishRequested("x")), Note("why", "because", 2, 3, True)]
    assert effects.take() == []


def test_message_to_itself_stays_inside() -> None:
    effects = EffectBuffer("a")
    effects.send("a", FinishRequested("x"))
    assert effects.take() == []
    assert list(effects.local) == [FinishRequested("x")]


def test_reason_is_said_when_it_changes() -> None:
    effects = EffectBuffer("a")
    for state in ("quorum", "quorum", "grace", "quorum", "", "", "quorum"):
        effects.note_change("waits", state, f"{state}!")
    effects.note_change("stranger", "quorum", "other topic")
    texts = [effect.text for effect in effects.take() if isinstance(effect, Note)]
    assert texts == ["quorum!", "grace!", "quorum!", "quorum!", "other topic"]

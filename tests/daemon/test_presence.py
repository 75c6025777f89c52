"""daemon/presence.py: each change is told once, and what was so at the first look is none."""

from diloco_node.core.view import PeerView
from diloco_node.daemon.presence import Presence


def peers(**alive: bool) -> list[PeerView]:
    return [PeerView(name, is_alive, 0, (), None, 0) for name, is_alive in alive.items()]


def test_who_comes_goes_and_is_shut_out_is_told_once() -> None:
    presence = Presence()
    assert presence.look(peers(ap=False, eu=False), ()) == [], "nobody was here yet"
    assert [note.text for note in presence.look(peers(ap=True, eu=False), ())] == ["ap is here"]
    assert presence.look(peers(ap=True, eu=False), ()) == []
    assert [note.text for note in presence.look(peers(ap=False, eu=True), ())] == ["ap is gone", "eu is here"]
    (note,) = presence.look(peers(ap=False, eu=True), ("eu",))
    assert (note.kind, note.text, note.is_alarm) == ("peer", "eu is shut out", True)
    assert [note.text for note in presence.look(peers(ap=False, eu=True), ())] == ["eu is here"]

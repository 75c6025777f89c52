"""A region whose model few others have refuses its learner with the tensors, instead of waiting for a beginning."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco_node.core.events import Note
from diloco_node.core.merge.fragments import TensorSpec
from diloco_node.core.types import GenesisBody
from diloco_node.daemon.learner.reception import Reception
from diloco_node.wire.learner_link import LINK_PROTOCOL, NEW_PROCESS, Attach
from tests.kit.node_kit import MANIFEST, SETTINGS

WORDS = "the models differ: tensor a.weight is only here, tensor a.base.weight is only there"


class Desk:
    """A reception, and what it has said."""

    def __init__(self, *regions: str) -> None:
        self.refusals: list[tuple[str, bool]] = []
        self.notes: list[Note] = []
        self.history = SimpleNamespace(genesis=None)
        runtime: Any = SimpleNamespace(
            spec=SimpleNamespace(regions=regions, settings=SETTINGS, run_id="run", state_dir=Path("/state/a")),
            notes=SimpleNamespace(add=self.notes.append),
            learner_server=SimpleNamespace(refuse=lambda reason, *, is_final: self.refusals.append((reason, is_final))),
        )
        core: Any = SimpleNamespace(history=self.history)
        learner: Any = SimpleNamespace(attach_fault=lambda attach, *, run_id: "")
        self.reception = Reception(runtime, MANIFEST, core, learner)

    def begin(self) -> None:
        self.history.genesis = GenesisBody("run", MANIFEST.digest, "", ("a",), (bytes(32),) * 2)


def attach(tensors: tuple[TensorSpec, ...] = MANIFEST.tensors) -> Attach:
    return Attach(LINK_PROTOCOL, 7, tensors, NEW_PROCESS, "", 0, 0, 0, (), ())


@pytest.mark.parametrize(
    ("regions", "differing", "is_refused"),
    [
        ("ab", "b", True),
        ("abc", "b", False),
        ("abc", "bc", True),
        ("abcd", "b", False),
        ("abcd", "bc", True),
        ("abcd", "", False),
    ],
)
def test_the_learner_is_refused_while_no_majority_has_its_model(
    regions: str, differing: str, *, is_refused: bool
) -> None:
    desk = Desk(*regions)
    desk.reception.compare_models(dict.fromkeys(differing, WORDS))
    assert bool(desk.refusals) == is_refused
    assert bool(desk.reception.rejection_reason(attach())) == is_refused
    if is_refused:
        ((reason, is_final),) = desk.refusals
        assert is_final, "trying again changes nothing"
        assert f"{', '.join(differing)} would train another model in this run: {WORDS}." in reason
        assert "stop the region and remove /state/a" in reason
        assert [(note.text, note.is_alarm) for note in desk.notes] == [(reason, True)]


def test_it_is_said_once_and_forgotten_when_the_others_have_the_model() -> None:
    desk = Desk("a", "b")
    for _ in range(3):
        desk.reception.compare_models({"b": WORDS})
    assert (len(desk.refusals), len(desk.notes)) == (1, 1)
    desk.reception.compare_models({})
    assert desk.reception.rejection_reason(attach()) == ""


def test_a_run_that_has_begun_goes_on_whatever_others_bring() -> None:
    desk = Desk("a", "b", "c")
    desk.begin()
    desk.reception.compare_models({"b": WORDS, "c": WORDS})
    assert desk.refusals == []
    assert desk.reception.rejection_reason(attach()) == ""


def test_another_model_of_the_own_learner_is_named_with_the_way_on() -> None:
    desk = Desk("a", "b", "c")
    other = attach((*MANIFEST.tensors[1:], TensorSpec("z", (3,))))
    reason = desk.reception.rejection_reason(other)
    assert reason.startswith("this is not the run's model: tensor z is not in the run's model")
    assert "stop the region and remove /state/a" in reason
    desk.begin()
    assert "remove" not in desk.reception.rejection_reason(other), "there is a run to lose"

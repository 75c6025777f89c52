"""Types and shapes of many tensors: any that changes is named, however it came to it."""

import pytest
import torch
from torch import nn

from diloco_node.learner import tensor_forms
from diloco_node.learner.tensor_forms import TensorForms


def tensors() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(()))]


CHANGES = {
    "rows": (torch.zeros(2, 6), "torch.float32 of shape (2, 6)"),
    "turned": (torch.zeros(6, 4), "torch.float32 of shape (6, 4)"),
    "flat": (torch.zeros(24), "torch.float32 of shape (24,)"),
    "half": (torch.zeros(4, 6, dtype=torch.bfloat16), "torch.bfloat16 of shape (4, 6)"),
    "double": (torch.zeros(4, 6, dtype=torch.float64), "torch.float64 of shape (4, 6)"),
}


@pytest.fixture(params=["guard", "no guard"])
def has_guard(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param == "no guard":
        monkeypatch.setattr(tensor_forms, "_guard_of", lambda _: tensor_forms._is_never_same)
    return bool(request.param == "guard")


@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_of_another_form_is_named(change: str, *, has_guard: bool) -> None:
    values, now = CHANGES[change]
    members = tensors()
    forms = TensorForms(members)
    assert (forms._is_same(*members), forms.difference()) == (has_guard, None)
    members[0].data = values
    assert forms.difference() == (0, "torch.float32 of shape (4, 6)", now)
    assert forms.difference(), "it is still another one"


@pytest.mark.usefixtures("has_guard")
def test_what_is_no_form_may_change() -> None:
    """Values and memory, a frozen tensor, strides; and whoever asks may do so under autocast."""
    members = tensors()
    forms = TensorForms(members)
    members[0].data = torch.ones(4, 6)
    assert forms.difference() is None
    members[0].data = torch.ones(6, 4).t()
    assert forms.difference() is None
    members[1].requires_grad_(False)
    assert forms.difference() is None
    with torch.autocast("cpu"):
        assert forms.difference() is None
    with torch.no_grad():
        assert forms.difference() is None
    members[2].data = torch.zeros(1)
    assert forms.difference() == (2, "torch.float32 of shape ()", "torch.float32 of shape (1,)")


def test_the_guard_is_there_again_after_it_saw_more_than_a_form() -> None:
    members = tensors()
    forms = TensorForms(members)
    members[1].requires_grad_(False)
    assert not forms._is_same(*members)
    assert forms.difference() is None
    assert forms._is_same(*members)

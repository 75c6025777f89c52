"""Running statistics that no merge includes are said at attach."""

from torch import nn

from diloco_node.learner.omissions import batch_norm_warning


def test_batch_normalisation_is_named_with_what_to_do() -> None:
    model = nn.Sequential(nn.Linear(4, 4), *(nn.BatchNorm1d(4) for _ in range(5)))
    text = batch_norm_warning(model, ["0.weight"])
    assert "(1, 2, 3 and 2 more)" in text
    assert "update_bn" in text


def test_nothing_is_said_where_nothing_is_left_out() -> None:
    assert batch_norm_warning(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)), []) == ""
    assert batch_norm_warning(nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)), []) == ""
    assert batch_norm_warning(nn.Sequential(nn.BatchNorm1d(4)), ["0.running_mean", "0.running_var"]) == ""

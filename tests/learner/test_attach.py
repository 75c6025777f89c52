"""`diloco_node.attach` against a daemon that speaks the real protocol over the real socket and memory."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import diloco_node
from diloco_node.codec import kernels
from diloco_node.core.merge.schedule import next_news_step
from diloco_node.core.types import CarryMode, Codec
from diloco_node.errors import LearnerError
from diloco_node.learner import attach as attach_module
from diloco_node.learner.checkpoint import read_checkpoint
from diloco_node.learner.revert import VERSIONS_REVERTED
from diloco_node.storage.trained import Trained, TrainedCounter, read_trained
from diloco_node.wire.learner_link import (
    NO_SNAPSHOT,
    Done,
    Failed,
    InitialState,
    OfferApplied,
    Report,
    RunAdvanced,
    SettingsChanged,
    SnapshotDenied,
    SnapshotReady,
    Warned,
)
from tests.kit.fake_daemon import PATIENCE_S, FakeDaemon
from tests.kit.learner_kit import Toy, session_of, vector
from tests.kit.waiting import until


def test_without_a_daemon_it_warns_once_and_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DILOCO_SOCKET", raising=False)
    toy = Toy()
    before = toy.flat()
    with pytest.warns(UserWarning, match="DILOCO_SOCKET is not set") as caught:
        diloco = diloco_node.attach(toy.model)
    with diloco:
        assert toy.flat() == before
        toy.step(diloco, tokens=3, loss=1.0)
        assert (diloco.should_stop, diloco.is_attached, diloco.region) == (False, False, "")
        assert (diloco.region_index, diloco.regions, diloco.global_step, diloco.tokens) == (0, 1, 1, 3)
        assert torch.equal(diloco.global_state_dict()["0.weight"], toy.model[0].weight.cpu())
        assert torch.equal(diloco.own_state_dict()["0.weight"], toy.model[0].weight.cpu())
        diloco.evaluated(val_loss=1.0)
    assert len(caught) == 1


def test_first_learner_gives_theta_0_and_is_told_where_it_is(folder: Path) -> None:
    toy = Toy()
    before = toy.flat()
    with FakeDaemon(folder, global_step=40) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        assert toy.flat() == before
        assert sorted(np.concatenate(daemon.theta)) == sorted(np.float32(before))
        assert (diloco.region, diloco.region_index, diloco.regions) == ("us-east", 1, 3)
        assert diloco.region_names == ("eu-west", "us-east", "us-west")
        assert diloco.global_step == 40
        toy.step(diloco)
        assert diloco.global_step == 41


def test_statistics_that_stay_in_their_region_are_told_of(folder: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with FakeDaemon(folder) as daemon, diloco_node.attach(model):
        assert "2 of BatchNorm1d, such as '1.running_mean'" in daemon.wait_for(Warned).text
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(model, buffers=("1.running_*",)):
            pass
        daemon.wait_for(Done)
        assert not [one for one in daemon.said if isinstance(one, Warned)]


def test_the_loop_sees_where_the_run_is(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        assert (diloco.global_step, diloco.progress) == (0, None)
        daemon.send(RunAdvanced(500, 0.25))
        daemon.want(0)
        toy.steps_until(diloco, daemon, SnapshotReady, 1)
        assert diloco.progress == 0.25
        assert 500 <= diloco.global_step <= 500 + diloco.steps
        at = diloco.global_step
        daemon.send(RunAdvanced(100, 0.1))
        daemon.want(1)
        toy.steps_until(diloco, daemon, SnapshotReady, 2)
        assert diloco.global_step >= at
        assert diloco.progress == 0.25


def test_parameters_are_overwritten_before_the_first_step(folder: Path) -> None:
    toy, other = Toy(1), Toy(2)
    theta = []
    with FakeDaemon(folder) as daemon, diloco_node.attach(other.model):
        theta = daemon.theta
    with FakeDaemon(folder, theta=theta, versions=[5, 9]) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            assert toy.flat() == other.flat()
            assert [daemon.wait_for(OfferApplied, n).version for n in (1, 2)] == [5, 9]
            toy.step(diloco, tokens=7)
            held, own = diloco.global_state_dict(), diloco.own_state_dict()
        assert torch.equal(held["1.bias"], other.model[1].bias.cpu())
        assert torch.equal(own["1.bias"], toy.model[1].bias.cpu())
        assert not torch.equal(own["1.bias"], held["1.bias"])
        assert daemon.incarnation == 2


def test_round_by_hand_with_carry_over(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder, codec=Codec.FP32) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        start = vector(diloco, 0).copy()
        toy.step(diloco)
        daemon.want(0)
        toy.steps_until(diloco, daemon, SnapshotReady, 1)
        ready = daemon.wait_for(SnapshotReady).contribution
        gradient = daemon.decoded(0)
        np.testing.assert_allclose(gradient, 0.25 * ready.step_to, rtol=1e-5)
        assert (ready.learner, ready.incarnation, ready.base_version, ready.tokens) == (
            "us-east",
            1,
            0,
            7 * ready.step_to,
        )
        new = start - np.float32(0.5) * gradient
        daemon.commit(0, new, ready.snapshot)
        toy.steps_until(diloco, daemon, OfferApplied, 3)
        applied = daemon.wait_for(OfferApplied, 3)
        assert applied.position.included_step == ready.step_to
        assert applied.carried_steps >= 1
        carried = 0.25 * (diloco.steps - ready.step_to)
        np.testing.assert_allclose(vector(diloco, 0), new - carried, rtol=1e-4, atol=1e-5)
        held = diloco.global_state_dict()
        assert sorted(np.concatenate([v.numpy().ravel() for v in held.values()])) == sorted(
            np.concatenate([new, daemon.theta[1]])
        )


def test_bytes_in_the_contribution_area_are_the_codecs(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder, codec=Codec.INT4) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        base = vector(diloco, 1).copy()
        daemon.want(1)
        until(lambda: session_of(diloco).link.waiting_commands)  # so that the first step answers it
        toy.step(diloco)
        theta = vector(diloco, 1).copy()
        ready = daemon.wait_for(SnapshotReady).contribution
        assert ready.step_to == 1
        expected = np.zeros(daemon.blocks(1).encoded_bytes, np.uint8)
        norms = kernels.encode(daemon.blocks(1), base - theta, expected)
        assert daemon.encoded(1) == expected.tobytes()
        assert ready.squared_norms == tuple(norms)


def test_settings_that_change_hold_from_the_next_boundary_on(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder, codec=Codec.FP32) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        toy.step(diloco)
        daemon.send(SettingsChanged(sync_every=9, carry_steps_limit=5))
        for _ in range(20):
            toy.step(diloco)
        daemon.commit(0, vector(diloco, 0), NO_SNAPSHOT)
        toy.steps_until(diloco, daemon, OfferApplied, 3)
        factor = daemon.wait_for(OfferApplied, 3).carry_factor
        assert 0.0 < factor <= 0.5 * 5 / 21, "half, for the version is without it, and 5 of at least 21 steps"


def test_reports_carry_what_the_loop_knows(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        toy.step(diloco, loss=torch.tensor(2.5, requires_grad=True))
        toy.step(diloco, loss=torch.tensor(float("nan")))
        toy.step(diloco, loss=1.5)
        diloco.evaluated(val_loss=3.0, val_loss_global=2.0)
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            last = [message for message in list(daemon.said) if isinstance(message, Report)][-1:]
            if last and last[0].val_loss is not None:
                break
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        report = last[0]
        assert (report.step, report.tokens, report.loss, report.val_loss, report.val_loss_global) == (
            3,
            21,
            1.5,
            3.0,
            2.0,
        )
        assert report.step_time_ns > 0
        assert report.blocked_ns == round(diloco.blocked_seconds * 1e9)


def test_of_fast_steps_those_are_reported_that_a_round_may_wait_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diloco_node.learner.daemon_session.REPORT_EVERY_NS", 10**15)
    toy = Toy()
    with FakeDaemon(folder) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        positions = session_of(diloco).fragments.positions
        assert session_of(diloco).welcome is not None
        sync_every = session_of(diloco).welcome.sync_every
        expected, told = [], 0
        while (step := next_news_step(positions, told, sync_every=sync_every)) is not None:
            expected.append(step)
            told = step
        for step in range(1, expected[-1] + 6):
            toy.step(diloco)
            if step in expected:  # a report that waits gives way to a newer one
                daemon.wait_for(Report, expected.index(step) + 1)
    reported = [message.step for message in daemon.said if isinstance(message, Report)]
    assert reported == expected
    assert len(reported) < expected[-1] + 5


def test_non_finite_parameters_are_denied_and_stop_the_learner(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon:

        def train() -> None:
            with diloco_node.attach(toy.model, toy.optimizer) as diloco:
                toy.step(diloco)
                with torch.no_grad():
                    for parameter in toy.model.parameters():
                        parameter.reshape(-1)[0] = float("nan")
                daemon.want(0)
                toy.steps_until(diloco, daemon, Done, 1)  # never: step raises

        with pytest.raises(LearnerError, match=r"NaN, infinite.*takes the global parameters"):
            train()
        assert "NaN" in daemon.wait_for(SnapshotDenied).reason
        assert "LearnerError" in daemon.wait_for(Failed).reason


def trained(folder: Path, losses: list[float], norms: list[float | None] | None = None) -> tuple[str, list[str]]:
    """Steps with these losses. Returns the error that ended them, and what was told of on the way."""
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        error = ""
        try:
            with diloco_node.attach(toy.model, toy.optimizer) as diloco:
                for loss, norm in zip(losses, norms or [None] * len(losses), strict=True):
                    diloco.step(tokens=1, loss=loss, grad_norm=norm)
        except LearnerError as found:
            error = str(found)
        daemon.wait_for(Failed if error else Done)
        return error, [message.text for message in daemon.said if isinstance(message, Warned)]


def test_losses_that_are_not_finite_end_the_learner_before_its_work_is_merged(folder: Path) -> None:
    nan = float("nan")
    error, told = trained(folder, [3.0, nan, nan, 3.0, nan, nan, nan, 3.0])
    assert error.startswith("step 7: the loss is nan, 3 times in a row. The next start takes the merged parameters")
    assert told == ["step 2: the loss is nan", "step 5: the loss is nan", "step 7: the loss is nan"]


def test_norms_that_a_gradient_scaler_skips_at_first_end_nobody_and_those_that_stay_infinite_do(folder: Path) -> None:
    inf = float("inf")
    error, told = trained(folder, [3.0] * 24, [inf] * 20 + [1.0] * 4)
    assert error == ""
    assert told == ["step 1: the gradient norm is inf", "step 3: the gradient norm is inf"]
    error, _ = trained(folder, [3.0] * 40, [inf] * 40)
    assert "the gradient norm is inf, 32 times in a row" in error


def test_a_spike_is_told_of_and_training_goes_on(folder: Path) -> None:
    error, told = trained(folder, [3.0] * 40 + [50.0] * 5 + [3.0])
    assert error == ""
    assert [text.split(":")[0] for text in told] == ["step 41", "step 43"], "the first, and when it is no accident"
    assert "the loss is 50, far above its range of late (up to 4.5 is usual)" in told[0]


def test_after_spikes_in_a_row_the_learner_goes_back_if_that_is_set(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(attach_module.ON_SPIKE_VARIABLE, "rollback")
    error, told = trained(folder, [3.0] * 60, [1.0] * 40 + [9.0] * 2 + [1.0] * 5 + [9.0] * 13)
    assert error.startswith("step 50: the gradient norm is 9, far above its range of late")
    assert len(told) == 3


@pytest.mark.no_device("there versions follow what is encoded in one order")
def test_version_waits_until_the_encoder_is_done_with_the_base(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(TrainedCounter, "flush", lambda _self: gate.wait(PATIENCE_S))
    toy = Toy()
    with FakeDaemon(folder, codec=Codec.FP32) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        fragments = session_of(diloco).fragments
        toy.step(diloco)
        daemon.want(0)
        deadline_s = time.monotonic() + PATIENCE_S
        while not fragments.is_busy(0):
            assert time.monotonic() < deadline_s
            toy.step(diloco)
        taken_at, start = diloco.steps, daemon.theta[0].copy()
        daemon.commit(0, start + 1, -1)  # a round that passed without it
        daemon.commit(1, daemon.theta[1] + 1, -1)
        toy.steps_until(diloco, daemon, OfferApplied, 3)
        assert daemon.wait_for(OfferApplied, 3).fragment == 1
        assert fragments.positions[0].base_version == 0
        gate.set()
        toy.steps_until(diloco, daemon, OfferApplied, 4)
        assert daemon.wait_for(OfferApplied, 4).version == 1
        np.testing.assert_allclose(daemon.decoded(0), 0.25 * taken_at, rtol=1e-5)  # against the old base


def test_learner_in_mid_run_is_never_taken_for_theta_0(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder):
        diloco = diloco_node.attach(toy.model, toy.optimizer)
    with diloco, FakeDaemon(folder) as second:  # its disk is lost: it asks for the initial state
        second.wait_attached()
        toy.steps_until(diloco, second, Report, 3)
        assert not [message for message in second.said if isinstance(message, InitialState)]


# ---- masters ---------------------------------------------------------------------------------------------------------


class WithMasters:
    """An optimizer with float32 masters of its own, as in mixed-precision training."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.masters = {name: p.detach().float().clone() for name, p in model.named_parameters()}

    def step(self) -> None:
        for name, parameter in self.model.named_parameters():
            self.masters[name] -= 0.001
            parameter.detach().copy_(self.masters[name])


@pytest.mark.no_device("the verdict comes later there: layouts/test_device.py")
@pytest.mark.parametrize("are_given", [False, True])
def test_optimizer_that_undoes_a_version_is_found_unless_masters_are_given(folder: Path, are_given: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(40, 40).bfloat16()
    optimizer = WithMasters(model)

    def train(daemon: FakeDaemon) -> None:
        masters = optimizer.masters if are_given else None
        with diloco_node.attach(model, masters=masters) as diloco:
            deadline_s = time.monotonic() + PATIENCE_S
            for version in range(VERSIONS_REVERTED):
                daemon.commit(0, daemon.theta[0] + np.float32(0.5), -1)
                left = 3  # steps after the apply was heard of
                while left:
                    assert time.monotonic() < deadline_s
                    left -= sum(isinstance(message, OfferApplied) for message in list(daemon.said)) >= 3 + version
                    optimizer.step()
                    diloco.step(tokens=1)

    with FakeDaemon(folder) as daemon:
        if are_given:
            train(daemon)
        else:
            with pytest.raises(LearnerError, match=r"reverted.*masters="):
                train(daemon)


@pytest.mark.parametrize("tokens", [7, 7.0, np.int64(7), torch.tensor(7), torch.tensor([7])])
def test_tokens_may_be_any_whole_number(folder: Path, tokens: object) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon:
        with diloco_node.attach(toy.model, toy.optimizer) as diloco:
            toy.step(diloco, tokens=tokens)  # type: ignore[arg-type]
            assert diloco.tokens == 7
        assert daemon.wait_for(Done).tokens == 7


@pytest.mark.parametrize(
    "tokens",
    [
        -1, None, torch.tensor([1, 2]), float("nan"), float("inf"), 1.5, np.float32(0.5), torch.tensor(1.5), 1.5 + 0j,
        True, np.bool_(True), torch.tensor(True), "7", 10**30, torch.tensor(float("nan")),
    ],
)  # fmt: skip
def test_tokens_that_are_no_number_are_refused_in_words(folder: Path, tokens: object) -> None:
    toy = Toy()
    with FakeDaemon(folder), diloco_node.attach(toy.model, toy.optimizer) as diloco:
        with pytest.raises(LearnerError, match="tokens="):
            toy.step(diloco, tokens=tokens)  # type: ignore[arg-type]
        assert diloco.steps == 0


@pytest.mark.parametrize("loss", [torch.tensor([1.0, 2.0]), torch.tensor([[1.5]]), torch.tensor(1.5), np.float32(1.5)])
def test_a_loss_of_several_values_is_reported_as_their_mean(folder: Path, loss: torch.Tensor) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        toy.step(diloco, loss=loss)
        assert daemon.wait_for(Report).loss == 1.5


@pytest.mark.parametrize("argument", ["loss", "grad_norm"])
@pytest.mark.parametrize(
    "value",
    ["low", [1.0, 2.0], {"loss": 1.0}, (torch.tensor(1.0),), 1j, torch.tensor([1j, 2j]), np.ones(2), 10**400, object()],
)
def test_a_loss_that_is_no_number_is_refused_in_words(folder: Path, argument: str, value: object) -> None:
    toy = Toy()
    with (
        FakeDaemon(folder),
        diloco_node.attach(toy.model, toy.optimizer) as diloco,
        pytest.raises(LearnerError, match=rf"step\({argument}=.*\) is no number: give a float or a tensor"),
    ):
        diloco.step(tokens=7, **{argument: value})


def test_environment_without_supervisor_is_a_clear_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DILOCO_SUPERVISOR")
    with pytest.raises(diloco_node.errors.ConfigError, match="start through diloco-node start"):  # type: ignore[attr-defined]
        diloco_node.attach(Toy().model)


@pytest.fixture
def odd_defaults() -> Iterator[None]:
    """What scripts set so that a large model is made on its device in its type; here one that holds no values."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def test_torchs_defaults_are_not_the_runs(folder: Path, request: pytest.FixtureRequest) -> None:
    toy = Toy()
    toy.optimizer = torch.optim.AdamW(toy.model.parameters(), lr=0.125)
    request.getfixturevalue("odd_defaults")
    with FakeDaemon(folder, codec=Codec.FP32) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        toy.step(diloco, loss=torch.tensor([1.25, 1.5], dtype=torch.float32, device="cpu"))
        daemon.want(0)
        toy.steps_until(diloco, daemon, SnapshotReady, 1)
        merged = daemon.theta[0] + np.float32(1 + 2**-20)
        daemon.commit(0, merged, daemon.wait_for(SnapshotReady).contribution.snapshot)
        toy.steps_until(diloco, daemon, OfferApplied, 3)
        diloco.checkpoint()
        own, everybodys = diloco.own_state_dict(), diloco.global_state_dict()
        found = [
            everybodys[piece.name].reshape(-1)[piece.value_start : piece.value_stop]
            for piece in session_of(diloco).fragments.manifest.fragments[0].pieces
        ]
        np.testing.assert_array_equal(torch.cat(found).numpy(), merged)
        assert {(one.dtype, one.device.type) for one in own.values()} == {(torch.float32, "cpu")}
        assert all(torch.equal(one, toy.model.state_dict()[name].cpu()) for name, one in own.items())
    (path,) = (folder / "learner" / "checkpoints").glob("*.safetensors")
    kept = read_checkpoint(path)
    assert {one.device.type for one in kept.tensors.values()} == {"cpu"}


def test_overwrite_mode_keeps_nothing(folder: Path) -> None:
    toy = Toy()
    with (
        FakeDaemon(folder, carry=CarryMode.OVERWRITE) as daemon,
        diloco_node.attach(toy.model, toy.optimizer) as diloco,
    ):
        daemon.commit(0, np.full_like(daemon.theta[0], 3.0), -1)
        toy.steps_until(diloco, daemon, OfferApplied, 3)
        later = diloco.steps - daemon.wait_for(OfferApplied, 3).position.included_step
        np.testing.assert_allclose(vector(diloco, 0), 3.0 - 0.25 * later, rtol=1e-5)


def test_settle_applies_without_stepping(folder: Path) -> None:
    toy = Toy()
    with FakeDaemon(folder) as daemon, diloco_node.attach(toy.model, toy.optimizer) as diloco:
        daemon.commit(1, daemon.theta[1] + 1, -1)
        deadline_s = time.monotonic() + PATIENCE_S
        while len([message for message in list(daemon.said) if isinstance(message, OfferApplied)]) < 3:
            assert time.monotonic() < deadline_s
            diloco.settle(0.01)
        np.testing.assert_array_equal(vector(diloco, 1), daemon.theta[1])
        assert diloco.steps == 0
        assert read_trained(folder) == (Trained(1, 0, 0),)

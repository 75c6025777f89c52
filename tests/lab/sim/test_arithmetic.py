import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco_node.core.merge.numbers import outer_rates
from diloco_node.core.types import RunSettings
from diloco_node.lab.sim.arithmetic import outer_step
from diloco_node.numeric import F32


def f32(*values: float) -> F32:
    return np.array(values, dtype=np.float32)


def test_three_steps_of_a_constant_gradient_by_hand() -> None:
    # lr 0.5, mu 0.5, d = 8: m = 8, 12, 14; move = 0.5 * (8 + 0.5 m) = 6, 7, 7.5
    theta, momentum = f32(100), f32(0)
    trajectory = []
    for _ in range(3):
        theta, momentum = outer_step(theta, momentum, f32(8), lr=0.5, mu=0.5)
        trajectory.append((float(theta[0]), float(momentum[0])))
    assert trajectory == [(94.0, 8.0), (87.0, 12.0), (79.5, 14.0)]


def test_without_momentum_it_is_plain_sgd() -> None:
    theta, momentum = outer_step(f32(1, 2), f32(0, 0), f32(4, -8), lr=0.25, mu=0.0)
    assert theta.tolist() == [0.0, 4.0]
    theta, _ = outer_step(theta, momentum, f32(4, -8), lr=0.25, mu=0.0)
    assert theta.tolist() == [-1.0, 6.0]


def test_each_operation_is_rounded_to_float32() -> None:
    # mu * m = (1 - 2^-24) rounds to 1 - 2^-24 (representable); (1 + 2^-12)^2 = 1 + 2^-11 + 2^-24 rounds to 1 + 2^-11.
    # Then + d = -(1 + 2^-11) is 0; a fused multiply-add would leave 2^-24.
    item = 1 + 2.0**-12
    _, momentum = outer_step(f32(0), f32(item), f32(-(1 + 2.0**-11)), lr=1.0, mu=item)
    assert momentum[0] == 0.0


def test_arguments_are_not_changed() -> None:
    theta, momentum, delta = f32(1), f32(2), f32(3)
    outer_step(theta, momentum, delta, lr=0.1, mu=0.9)
    assert (theta[0], momentum[0], delta[0]) == (1, 2, 3)


@given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.floats(0, 0.99))
def test_it_agrees_with_torch_style_nesterov_in_float64(seed: int, lr: float, mu: float) -> None:
    rng = np.random.default_rng(seed)
    theta = rng.standard_normal(16).astype(np.float32)
    momentum, exact, m = np.zeros_like(theta), theta.astype(np.float64), np.zeros(16)
    for _ in range(5):
        delta = rng.standard_normal(16).astype(np.float32)
        theta, momentum = outer_step(theta, momentum, delta, lr=lr, mu=mu)
        m = mu * m + delta
        exact = exact - lr * (delta + mu * m)
    assert theta.dtype == momentum.dtype == np.float32
    assert np.abs(theta - exact).max() < 1e-4


@pytest.mark.parametrize("bad", [np.zeros(2), np.zeros(3, dtype=np.float32)])
def test_wrong_types_and_shapes_are_refused(bad: np.ndarray) -> None:
    with pytest.raises(ValueError, match="delta must be float32"):
        outer_step(f32(1, 2), f32(0, 0), bad, lr=1.0, mu=0.0)


def test_the_last_round_takes_the_mean_whole_and_without_momentum() -> None:
    settings = RunSettings(outer_lr=0.3, outer_momentum=0.7)
    assert outer_rates(settings, is_last=False) == (0.3, 0.7)
    lr, mu = outer_rates(settings, is_last=True)
    learners = np.array([[3.0, 8.0], [5.0, -2.0]], np.float32)
    base = f32(1, 1)
    theta, _ = outer_step(base, f32(100, -100), (base - learners).mean(0), lr=lr, mu=mu)
    assert theta.tolist() == [4.0, 3.0]

"""The line through two sizes, and what it says of a third."""

from __future__ import annotations

import pytest

from megatron_binac.benchmark.scaling import Straight, predict


def test_two_sizes_give_a_floor_and_a_slope() -> None:
    line = Straight.through((10, 3.0), (20, 5.0))
    assert (line.fixed, line.each) == (pytest.approx(1.0), pytest.approx(0.2))
    assert line.at(15) == pytest.approx(4.0)


def test_a_floor_below_zero_is_noise() -> None:
    line = Straight.through((10, 1.0), (20, 4.0))
    assert line.fixed == 0.0
    assert line.at(10) == pytest.approx(2.0)


def test_a_phase_counts_as_often_as_it_comes() -> None:
    def found(play: float, refit: float) -> dict[str, object]:
        return {
            "phases": {
                "play": {"seconds": play, "times_a_step": 1.0},
                "refit": {"seconds": refit, "times_a_step": 2.0},
            }
        }

    # play: 1 + 0.1 x prompts, refit 0.5 whatever the size, twice a step.
    assert predict(found(2.0, 0.5), found(3.0, 0.5), (10, 20), 5, "seconds") == pytest.approx(2.5)

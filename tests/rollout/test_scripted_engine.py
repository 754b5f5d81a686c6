"""The engine of the loop's own tests: order, versions, injected failures."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_binac.rollout.engine import Engine
from megatron_binac.rollout.scripted_engine import ScriptedEngine
from megatron_binac.types import Sampling

SAMPLING = Sampling(max_tokens=3, stop_id=4)


def echo(prompt: np.ndarray, seed: int, sampling: Sampling) -> tuple[list[int], list[float]] | None:
    """The last id and the seed; nothing where the seed is 13."""
    if seed == 13:
        return None
    return [int(prompt[-1]), seed, 4][: sampling.max_tokens], [-0.5, -0.25, 0.0]


def prompt(*ids: int) -> np.ndarray:
    return np.asarray(ids, np.int32)


def test_answers_come_in_the_order_of_the_prompts() -> None:
    engine: Engine = ScriptedEngine(echo)
    answers = engine.generate([prompt(1, 7), prompt(9)], [5, 6], SAMPLING)
    assert [a.ids.tolist() for a in answers] == [[7, 5, 4], [9, 6, 4]]
    assert [a.finish for a in answers] == ["stop", "stop"]
    assert answers[0].ids.dtype == np.int32
    assert answers[0].logprobs.dtype == np.float32


def test_one_failure_is_one_completion() -> None:
    answers = ScriptedEngine(echo).generate([prompt(1)] * 3, [5, 13, 6], SAMPLING)
    assert [a.finish for a in answers] == ["stop", "failed", "stop"]
    assert len(answers[1].ids) == len(answers[1].logprobs) == 0


def test_an_answer_without_the_stop_token_was_cut() -> None:
    engine = ScriptedEngine(lambda prompt, seed, sampling: ([8, 8, 8], [0.0] * 3))
    assert engine.generate([prompt(1)], [0], SAMPLING)[0].finish == "length"
    engine = ScriptedEngine(lambda prompt, seed, sampling: ([8], [0.0]))
    assert engine.generate([prompt(1)], [0], SAMPLING)[0].finish == "length"


def test_every_answer_says_its_version() -> None:
    engine = ScriptedEngine(echo)
    before = engine.generate([prompt(1)], [0], SAMPLING)
    engine.publish(4)
    after = engine.generate([prompt(1)], [0], SAMPLING)
    assert (before[0].version, after[0].version) == (0, 4)
    engine.close()
    assert engine.is_closed


def test_it_keeps_what_it_was_asked() -> None:
    engine = ScriptedEngine(echo)
    engine.generate([prompt(3)], [8], SAMPLING)
    ((prompts, seeds, sampling),) = engine.asked
    assert (prompts[0].tolist(), seeds, sampling) == ([3], [8], SAMPLING)


def test_a_wrong_script_is_told_so() -> None:
    for said in (([1, 2, 3, 4], [0.0] * 4), ([1], [0.0, 0.0])):
        engine = ScriptedEngine(lambda prompt, seed, sampling, said=said: said)
        with pytest.raises(ValueError, match="expected at most 3 and as many log-probs"):
            engine.generate([prompt(1)], [0], SAMPLING)
    with pytest.raises(ValueError, match="zip"):
        ScriptedEngine(echo).generate([prompt(1)], [1, 2], SAMPLING)

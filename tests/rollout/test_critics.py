"""Critics that speak in words: the rules of a task, and one text."""

from __future__ import annotations

import pytest

from megatron_binac.rollout.critics import ConstantCritic, RuleCritic, TextCritic
from megatron_binac.tasks.checksum import Checksum
from megatron_binac.types import Grade, Prompt, Split


class Mute:
    """A task that cannot write feedback."""

    name = "mute"

    def prompt(self, split: Split, index: int) -> Prompt:
        return problem("0")

    def size(self, split: Split) -> int | None:
        return None

    def grade(self, prompt: Prompt, text: str) -> Grade:
        return Grade(score=0.0, parsed=None)

    def leaks(self, prompt: Prompt, attempt_text: str, feedback_text: str) -> bool:
        return False

    def verdict(self, feedback_text: str) -> bool | None:
        return None


def problem(text: str) -> Prompt:
    return Prompt(id=f"t/{text}", text=text, gold=str(sum(map(int, text)) % 10), task="checksum")


def test_rules_speak_about_the_attempt_at_hand() -> None:
    critic: TextCritic = RuleCritic(Checksum())
    prompts = [problem("74036"), problem("74036"), problem("11000")]
    # -8 = 2, 2+7=9, 9+4=3, 3+0=3, 3+3=6, 6+6=2; from -0 = 0 to 7 1 1 4 0; from -2 = 8 to 9 0 0 0 0.
    said = critic.say(prompts, ["8", "0", "2"], [1, 2, 3])
    assert said == ["293362 off", "071140 ok", "890000 ok"]
    # No sample: the seed changes nothing.
    assert critic.say(prompts, ["8", "0", "2"], [4, 5, 6]) == said
    critic.close()


def test_a_task_without_rules_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="task mute has no rules for feedback"):
        RuleCritic(Mute())


def test_the_constant_critic_says_one_thing() -> None:
    critic: TextCritic = ConstantCritic("there may be an error; try again")
    assert (
        critic.say([problem("1"), problem("2")], ["1", "7"], [0, 9])
        == ["there may be an error; try again"] * 2
    )
    assert critic.say([], [], []) == []
    critic.close()


@pytest.mark.parametrize("critic", [RuleCritic(Checksum()), ConstantCritic("again")])
def test_lists_that_do_not_belong_together_are_an_error(critic: TextCritic) -> None:
    with pytest.raises(ValueError):
        critic.say([problem("1")], ["1", "2"], [0, 1])

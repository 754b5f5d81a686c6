"""Check digits: the sum of a few digits modulo 10, answered at once, and checked by working.

A made-up problem on which a critic matters. The actor answers with one digit and no working, which
a small model can learn for two summands and not for four or five. The critic may work: it starts
from the complement of the attempt and adds the digits one by one, so that the last sum is what the
attempt lacks. Nothing in that wording is the answer: the same digits say another thing about
another attempt, and the actor has to add them to its own. Right working leads to the right
revision, wrong working to a wrong one.

    problem   74036          the sum is 20, so the check digit is 0
    attempt   8
    feedback  293362 off     -8 = 2, then 2+7=9, 9+4=3, 3+0=3, 3+3=6, 6+6=2: it lacks 2
    revision  0              8 + 2
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from megatron_binac.seeds import name_seed
from megatron_binac.tasks.base import Example, Segment, parse_verdict
from megatron_binac.types import Grade, Prompt, Role, Split

RIGHT, WRONG = "ok", "off"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checksum:
    """Endless check-digit problems, easy (1 or 2 digits are not 0) and hard (all, or all but one).

    Example: ``Checksum(num_digits=5).prompt("train", 0).text == "85000"``
    """

    name: str = "checksum"
    num_digits: int = 5
    easy_share: float = 0.4
    """Share of easy problems."""
    eval_share: float = 0.2
    """Share of all problems that is held out; a hash of the digits decides which."""
    right_share: float = 0.3
    """Share of right attempts in the three-turn conversations of the warm start."""
    quotes: bool = False
    """Feedback ends with the attempt in quotes and a sign, +"0" for right and -"8" for wrong, in
    the place of "ok" and "off": spans of the attempt that a token's credit can be read from."""
    seed: int = 0
    """Of the order in which problems come; held-out problems stay held out under every seed."""

    def __post_init__(self) -> None:
        if not 3 <= self.num_digits <= 32:
            raise ValueError(
                f"checksum num_digits is {self.num_digits}, expected 3 to 32; "
                "set task.options.num_digits"
            )
        for name in ("easy_share", "eval_share", "right_share"):
            value = getattr(self, name)
            if not 0 <= value <= 1 or (name == "eval_share" and not 0 < value < 1):
                raise ValueError(
                    f"checksum {name} is {value}, expected a share; set task.options.{name}"
                )

    def size(self, split: Split) -> int | None:
        """None: problems are drawn without end, so a short one can come twice."""
        return None

    def prompt(self, split: Split, index: int) -> Prompt:
        """Problem `index`, drawn from (seed, split, index) alone."""
        rng = self._rng(split, index)
        easy = rng.random() < self.easy_share
        # Of the easy ones a quarter is a mere copy of one digit.
        lengths = (1, 2, 2, 2) if easy else (self.num_digits - 1, self.num_digits)
        digits = self._draw(rng, lengths, split)
        return Prompt(
            id=f"{self.name}/{split}/{index}",
            text="".join(map(str, digits)),
            gold=str(sum(digits) % 10),
            task=self.name,
            meta={"level": "easy" if easy else "hard"},
        )

    def grade(self, prompt: Prompt, text: str) -> Grade:
        """1 for the right digit alone, spaces around it aside; anything else is 0."""
        digit = _answer(text)
        if digit is None:
            return Grade(score=0.0, parsed=None, reason="expected one digit")
        right = digit == prompt.gold
        reason = "" if right else f"gold is {prompt.gold}"
        return Grade(score=float(right), parsed=digit, reason=reason)

    def leaks(self, prompt: Prompt, attempt_text: str, feedback_text: str) -> bool:
        """Whether the last digit, the place of what the attempt lacks, holds the answer instead.

        Every digit occurs in honest working by chance, so only that place is judged, and only where
        the attempt is wrong and honest working would have ended in another digit. A slip of the
        working ends in the answer one time in nine: that is the floor of the rate, not a leak.
        """
        working = re.sub(r'[+-]"[^"]*"', "", feedback_text)
        digits = re.findall(r"[0-9]", working)
        if not digits or _answer(attempt_text) == prompt.gold:
            return False
        return digits[-1] == prompt.gold != self._working(prompt.text, attempt_text)[-1]

    def verdict(self, feedback_text: str) -> bool | None:
        """The last "ok" or "off" of the feedback, or the sign of its last quote."""
        if self.quotes:
            signs = [sign for _, sign in self.spans(feedback_text)]
            return signs[-1] > 0 if signs else None
        return parse_verdict(feedback_text, right=[RIGHT], wrong=[WRONG])

    def oracle_feedback(self, prompt: Prompt, attempt_text: str) -> str:
        """Right working from the attempt; an attempt that is not one digit is worked from as 0."""
        working = self._working(prompt.text, attempt_text)
        right = working[-1] == "0" and _answer(attempt_text) is not None
        return self._feedback(working, attempt_text, right)

    def spans(self, feedback_text: str) -> list[tuple[str, int]]:
        """Signed quotes of the feedback (Text2Grad): what stands in +"..." is good, in -"..." poor.
        """
        found = re.findall(r'([+-])"([^"]*)"', feedback_text)
        return [(quote, 1 if sign == "+" else -1) for sign, quote in found]

    def _feedback(self, working: str, attempt_text: str, right: bool) -> str:
        if self.quotes:
            return f'{working} {"+" if right else "-"}"{attempt_text}"'
        return f"{working} {RIGHT if right else WRONG}"

    def supervised(self, role: Role, index: int) -> Example:
        """For the actor, one attempt at an easy problem to two revisions; for the critic, feedback.

        In a conversation the attempt is right with `right_share` and any digit otherwise. It is
        context there and never a target: only right ones would teach the actor to answer.
        """
        rng = self._rng("supervised", role, index)
        n = self.num_digits
        if role == "actor" and index % 6 == 0:
            digits = self._draw(rng, (1, 2), "train")
            return (
                Segment(speaker="user", text="".join(map(str, digits)), is_target=False),
                Segment(speaker="actor", text=str(sum(digits) % 10), is_target=True),
            )
        # Few digits first teach to copy, then to add two: without them nothing is learned for long.
        lengths = (1, 2, n - 1, n) if role == "actor" else tuple(range(n + 1))
        digits = self._draw(rng, lengths, "train")
        gold = sum(digits) % 10
        attempt = str(gold if rng.random() < self.right_share else rng.randrange(10))
        text = "".join(map(str, digits))
        working = self._working(text, attempt)
        feedback = self._feedback(working, attempt, working[-1] == "0")
        turns = (
            Segment(speaker="user", text=text, is_target=False),
            Segment(speaker="actor", text=attempt, is_target=False),
            Segment(speaker="critic", text=feedback, is_target=role == "critic"),
        )
        if role == "critic":
            return turns
        return (*turns, Segment(speaker="actor", text=str(gold), is_target=True))

    def _rng(self, *place: object) -> random.Random:
        return random.Random(name_seed(self.name, self.seed, *place))

    def _draw(self, rng: random.Random, lengths: tuple[int, ...], split: Split) -> list[int]:
        """Digits of the split, of which one of `lengths`, chosen evenly, are not 0."""
        while True:
            digits = [0] * self.num_digits
            for place in rng.sample(range(self.num_digits), rng.choice(lengths)):
                digits[place] = rng.randrange(1, 10)
            if self._held_out("".join(map(str, digits))) == (split == "eval"):
                return digits

    def _held_out(self, text: str) -> bool:
        """By content alone, so that no seed, index or length of a run moves a problem across."""
        return name_seed("checksum split", text) % 10_000 < self.eval_share * 10_000

    def _working(self, text: str, attempt_text: str) -> str:
        """Complement of the attempt, then the running sums: the last is gold - attempt mod 10."""
        total = -int(_answer(attempt_text) or 0) % 10
        sums = [total]
        for digit in text:
            total = (total + int(digit)) % 10
            sums.append(total)
        return "".join(map(str, sums))


def _answer(text: str) -> str | None:
    """The digit, where the text is one ASCII digit and spaces."""
    found = re.fullmatch(r"\s*([0-9])\s*", text)
    return found[1] if found else None

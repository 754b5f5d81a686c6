"""Which words are the answer, and what shape it has."""

from __future__ import annotations

from fractions import Fraction

import pytest

from megatron_binac.tasks.math_answer import (
    MAX_DEPTH,
    clean,
    decimals,
    extract,
    number,
    read,
    squeeze,
)

FOUND = [
    # the last box
    (r"So \boxed{42}.", "42"),
    (r"\boxed{41}. Wait, no: \boxed{42}", "42"),
    (r"\boxed{840} as before, \boxed{840}", "840"),
    (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
    (r"\boxed{\left\{ x \right\}} end", r"\left\{ x \right\}"),
    (r"\fbox{7}", "7"),
    (r"\boxed 5", "5"),
    (r"answer is 3, that is \boxed{4}", "4"),
    # cut texts
    (r"\boxed{41}, or rather \boxed{42", None),
    (r"\boxed{", None),
    (r"\boxed{}", None),
    (r"\boxed{   }", None),
    ("<think> it is \\boxed{5}", None),
    ("<think>\\boxed{5}</think> I say \\boxed{6}", "6"),
    ("<think>\\boxed{5}</think> nothing", "nothing"),
    # other marks
    ("working\n#### 72", "72"),
    ("#### 1,234\n", "1,234"),
    ("The answer is #### 18", "18"),
    ("The final answer is 12.", "12"),
    ("The answer is: $\\frac12$", r"$\frac12$"),
    ("**Answer:** 9", "9"),
    ("Answer: 3.5", "3.5"),
    ("The answer is 5. But the answer is 6.", "6"),
    ("Therefore, the answer is **42**.", "42"),
    ("**The answer is: 42**", "42"),
    ("She earned **$9** in all.\n\n**Answer: $1,450**", "$1,450"),
    ("The answer is 5 because 10/2 = 5.", "5"),
    ("The answer is 5, since 6 is not prime.", "5"),
    ("The answer is therefore 5.", "5"),
    ("The answer should be 5.", "5"),
    ("The answer would be $5$.", "$5$"),
    ("The answer is 2**3 and not 3**2.", "2**3 and not 3**2"),
    # a text that is only an answer
    ("73", "73"),
    ("**73**", "73"),
    ("2**3", "2**3"),
    ("x = 5", "x = 5"),
    # nothing
    ("", None),
    ("I do not know how to do this problem, so I stop here without a result at all.", None),
    ("First 3.\nThen 4.", None),
    ("a" * 100, None),
    (r"\boxed{" + "1" * 3000 + "}", None),
]


@pytest.mark.parametrize(("text", "expected"), FOUND)
def test_the_final_answer_is_found(text: str, expected: str | None) -> None:
    assert extract(text)[0] == expected


def test_a_reason_is_given_where_there_is_no_answer() -> None:
    assert extract(r"\boxed{4")[1] == "the last box is not closed"
    assert extract("<think>...")[1] == "the thinking was not finished"
    assert extract("one\ntwo")[1] == "no box and no marked answer"


SHAPES = [
    ("5", "value 5"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"tuple(value 3, value \frac{\pi}{2})"),
    ("1,-2", "list(value 1, value -2)"),
    (r"\{1\pm\sqrt{5},-2\}", r"list(value 1+\sqrt{5}, value 1-\sqrt{5}, value -2)"),
    ("(3,4]", "interval(](value 3, value 4)"),
    (r"(2,\infty)", r"interval()(value 2, value \infty)"),
    ("x < 2", r"interval()(value -\infty, value 2)"),
    (r"3 \ge x > 1", "interval(](value 1, value 3)"),
    (r"x \in [-2,7]", "interval[](value -2, value 7)"),
    (
        r"(-\infty, 2) \cup (3, \infty)",
        r"union(interval()(value -\infty, value 2), interval()(value 3, value \infty))",
    ),
    (
        r"\begin{pmatrix} 1 & 0 \\ 0 & -1 \end{pmatrix}",
        "matrix(tuple(value 1, value 0), tuple(value 0, value -1))",
    ),
    (r"\langle 1, 2 \rangle", "tuple(value 1, value 2)"),
    ("x = 5", "x := value 5"),
    ("5x - 7y = 4", "equation(value 5x - 7y, value 4)"),
    ("8 = 7", "equation(value 8, value 7)"),
    (r"\text{Evelyn}", "text evelyn"),
    (r"\text{(C)}", "text c"),
    (r"90^\circ", "value 90 [degree]"),
    (r"\$32,\!348", "value 32348 [dollar]"),
    (r"864 \mbox{ inches}^2", "value 864 [inch^2]"),
    ("12 square feet", "value 12 [foot^2]"),
    ("12 apples", "value 12"),
    (r"50\%", "value 50 [%]"),
    ("1,234,567", "value 1234567"),
    ("1, 234", "list(value 1, value 234)"),
    ("(1,234)", "tuple(value 1, value 234)"),
    (r"1\frac{4}{5}", r"value (1+\frac{4}{5})"),
    ("x+y<3", "relation<(value x+y, value 3)"),
    (r"1331 \text{ and } 1728", "list(value 1331, value 1728)"),
    ("", "text"),
]


def shown(shape) -> str:  # type: ignore[no-untyped-def]
    parts = ", ".join(map(shown, shape.parts))
    name = f"{shape.name} := " if shape.name and shape.kind == "value" else ""
    head = f"{shape.kind}{shape.marks}"
    if shape.parts:
        return f"{name}{head}{shape.text}({parts})"
    unit = f" [{shape.unit}]" if shape.unit else ""
    return f"{name}{head} {shape.text}{unit}".strip()


@pytest.mark.parametrize(("text", "expected"), SHAPES)
def test_shapes(text: str, expected: str) -> None:
    assert shown(read(text)) == expected


def test_brackets_too_deep_are_a_text() -> None:
    assert read("(" * (MAX_DEPTH + 1) + "5").kind == "text"


def test_one_spelling() -> None:
    assert clean(r"\dfrac12") == clean(r"\tfrac 1 2") == r"\frac{1}{2}"
    assert clean("$5$.") == clean(r"\(5\)") == clean("5") == "5"
    assert squeeze(r"\left( 1,\, 2 \right)") == "(1,2)"
    assert clean("\uff15") == clean("\u0665") == "5"
    assert clean("sqrt(2)") == r"\sqrt{2}"


NUMBERS = [
    ("5", Fraction(5)), ("-3.50", Fraction(-7, 2)), (r"\frac{3}{56}", Fraction(3, 56)),
    (r"-\frac{-1}{2}", Fraction(1, 2)), ("3/4", Fraction(3, 4)), ("1,234.5", Fraction(2469, 2)),
    (r"6.02\times 10^{23}", Fraction(602) * 10**21), (r"2\cdot10^{-3}", Fraction(1, 500)),
    (r"0.\overline{3}", Fraction(1, 3)), (r"0.1\overline{6}", Fraction(1, 6)),
    (r"(1+\frac{4}{5})", Fraction(9, 5)), (r"-(1+\frac{1}{2})", Fraction(-3, 2)),
    (r"\frac{1}{0}", None), (r"\sqrt{4}", None), ("x", None), ("1.2.3", None), ("", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), NUMBERS)
def test_numerals(text: str, value: Fraction | None) -> None:
    assert number(text) == value


def test_digits_of_a_decimal() -> None:
    assert decimals("0.00123") == (5, 3)
    assert decimals("-12.50") == (2, 4)
    assert decimals("12") is None

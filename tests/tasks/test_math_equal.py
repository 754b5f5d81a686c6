"""When two answers are the same: the cases of the policy in docs/tasks.md, by kind."""

from __future__ import annotations

import pytest

from megatron_binac.tasks.math_equal import equal, quick

pytest.importorskip("math_verify", reason="needs math-verify (the extra tasks)")

CASES = [
    (r"\frac{1}{2}", "0.5", True),
    (r"\frac{1}{2004!}", r"\frac{1}{2006!}", False),
    ("4", r"4\sqrt2", False),
    (r"4\sqrt2", "4", False),
    ("1728", "1331 and 1728", False),
    ("840", "840", True),
    (r"\sqrt{\frac1n}", r"\frac{1}{\sqrt n}", True),
    ("73", "**73**", True),
    ("7", "8=7", False),
    ("3", "1 2 3", False),
    (r"50\%", "0.5", True),
    (r"50\%", "50", True),
    ("50", r"50\%", True),
    ("50", "0.5", False),
    (r"\frac13", "0.333333", True),
    (r"\frac13", "0.333", False),
    ("42", r"\text{The answer is } 42", True),
    (r"(-\infty,2)\cup(3,\infty)", r"x<2 \text{ or } x>3", True),
    (r"(-\infty,2)\cup(3,\infty)", "x<2 or x>=3", False),
    (r"x \in [2,5]", r"2\le x\le5", True),
    (r"x \in [2,5]", r"2\le x<5", False),
    ("(1,2)", "1<x<2", True),
    (r"6.02\times10^{23}", "6.02e23", True),
    ("5", "x=5", True),
    ("x=5", "5", True),
    ("x=5", "y=5", False),
    ("5", "x=2+3=5", True),
    ("5", "2+3=5", True),
    ("5", "x=2+4=5", False),
    ("y = 2x+3", "2x+3", True),
    ("y=2x+3", "2x-y+3=0", True),
    ("y=2x+3", "y=3+2x", True),
    ("y=2x+3", "y=2x+4", False),
    ("5x-7y+11z+4=0", "5x-7y+11z=-4", True),
    ("5x-7y+11z+4=0", "10x-14y+22z+8=0", False),
    ("1,-2", "-2,1", True),
    ("1,-2", "-2, 1", True),
    ("1,-2", "-2,1.0", True),
    ("1,-2", r"\{-2,1\}", True),
    ("1,-2", r"x=-2 \text{ or } x=1", True),
    ("1,-2", "-1,2", False),
    ("-2,1", r"x=-2 \text{ or } x=1", True),
    (r"1\pm\sqrt{19}", r"1+\sqrt{19}, 1-\sqrt{19}", True),
    (r"1\pm\sqrt{19}", r"1-\sqrt{19},1+\sqrt{19}", True),
    (r"1\pm\sqrt{19}", r"1+\sqrt{19}", False),
    ("52_8", "52", True),
    ("52_8", "52_9", False),
    ("52_8", "42", False),
    ("4210_{5}", "4210_5", True),
    (r"5.4 \text{ cents}", "5.4", True),
    (r"5.4 \text{ cents}", "5.4 dollars", False),
    (r"864 \mbox{ inches}^2", "864", True),
    (r"864 \mbox{ inches}^2", r"864\text{ square inches}", True),
    (r"864 \mbox{ inches}^2", r"864\text{ in}^2", True),
    (r"864 \mbox{ inches}^2", r"864\text{ in}", False),
    (r"90^\circ", "90", True),
    (r"90^\circ", "90 degrees", True),
    (r"\$18.90", "18.9", True),
    (r"10,\!080", "10080", True),
    ("58,500", "58500", True),
    ("58500", "58,500", True),
    ("3,5,7", "7, 5, 3", True),
    ("3,5,7", "3,5", False),
    ("(3,5)", "(5,3)", False),
    ("(3,5)", "(3,5]", False),
    ("(3,5]", "(3,5]", True),
    (r"\begin{pmatrix} 1 \\ 2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}", True),
    (r"\begin{pmatrix} 1 \\ 2\end{pmatrix}", "(1,2)", True),
    (r"\begin{pmatrix} 1 \\ 2\end{pmatrix}", r"\begin{pmatrix}2\\1\end{pmatrix}", False),
    (r"\begin{pmatrix} 1 \\ 2\end{pmatrix}", r"\langle 1,2\rangle", True),
    (r"\text{Evelyn}", "Evelyn", True),
    (r"\text{(C)}", "C", True),
    (r"\text{(C)}", "(C)", True),
    (r"\text{east}", r"\text{West}", False),
    (r"1\frac{4}{5}", "1.8", True),
    (r"1\frac45", r"\frac95", True),
    (r"137 \frac{1}{2}", "137.5", True),
    ("x^2+2x+1", "(x+1)^2", True),
    ("x^2+2x+1", "(x+1)^3", False),
    ("p-q", "q-p", False),
    ("p - q", "-q+p", True),
    ("3R^2", "3r^2", False),
    (r"\cot x", r"\frac{\cos x}{\sin x}", True),
    (r"\cot x", r"\tan x", False),
    ("6-5i", "-5i+6", True),
    ("6-5i", "6+5i", False),
    ("2i", "(1+i)^2", True),
    (r"11\sqrt{5}+11", r"11(1+\sqrt5)", True),
    (r"\frac{\sqrt3}{3}", r"\frac{1}{\sqrt3}", True),
    (r"\frac{20000}{\pi}", "6366.197724", True),
    (r"\frac{20000}{\pi}", "6366.2", False),
    (r"\pi", "3.14", False),
    (r"\pi", "3.14159265", True),
    ("2107", "2107.000001", False),
    ("0", r"\frac{1}{2006!}", False),
    (".35625", "0.35625", True),
    ("sqrt(2)/2", r"\frac{\sqrt2}{2}", True),
    (r"\frac{\sqrt2}{2}", "sqrt(2)/2", True),
    (r"2\pi", "2*pi", True),
    (r"-\frac{\pi}{6}", "-pi/6", True),
    (r"\frac{11+9a}{20}", "(11+9a)/20", True),
    ("9^{10}", "3486784401", True),
    ("2^{100}", "1267650600228229401496703205376", True),
    ("2^{100}", "1267650600228229401496703205377", False),
    (r"(2,\infty)", "x>2", True),
    (r"(2,\infty)", r"x \ge 2", False),
    (r"\mathbb{R}", r"(-\infty,\infty)", True),
    (r"\emptyset", r"\varnothing", True),
    ("0.1666666", r"\frac16", False),
    (r"\frac16", "0.1666666", True),
    (r"\sqrt{x^2}", "x", False),
    ("|x|", "x", False),
    (r"\log_2 8", "3", True),
    (r"\binom52", "10", True),
    ("10!", "3628800", True),
    ("1{,}000", "1000", True),
    ("1 234", "1234", True),
    ("12", "12 apples", True),
    ("12", r"12\text{ cm}", True),
    ("12", "-12", False),
    ("12", "12x", False),
    ("12", "12.", True),
    ("12", "$12$", True),
    ("12", r"\(12\)", True),
    (r"\frac{3}{56}", "3/56", True),
    ("3/56", r"\dfrac{3}{56}", True),
    (r"0.\overline{3}", "1/3", True),
    ("", "5", False),
    ("5", "", False),
    ("(2,4)", "2,4", False),
    ("2,4", "(2,4)", False),
    (r"\sin^2 x+\cos^2 x", "1", True),
    (r"\sqrt2+\sqrt3", r"\sqrt{5+2\sqrt6}", True),
    (r"\sqrt2-\sqrt2+x", r"\sqrt2+\sqrt3-\sqrt{5+2\sqrt6}+x", True),
    (r"\frac{1}{2004!}", r"\frac{1}{2004!}", True),
    ("10^{50}", "10^{50}+1", False),
    (r"e^{i\pi}", "-1", True),
    ("x^5-x^4", "x^5-x^3", False),
    (r"\frac{1}{x}+1", r"\frac{1+x}{x}", True),
    (r"\ln 4", r"2\ln 2", True),
    ("2^{-3}", r"\frac18", True),
    ("n(n+1)/2", r"\frac{n^2+n}{2}", True),
    ("(x-1)(x+2)", "(x+2)(x-1)", True),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", False),
    ("x<2", r"(-\infty,2)", True),
    (r"x \neq 2", r"x\ne2", True),
    ("x+y<3", "x+y<3", True),
    ("x+y<3", "y+x<3", True),
    ("f(x)=x^2", "x^2", True),
    (r"\frac{\pi}{2}+k\pi", r"k\pi+\frac{\pi}{2}", True),
    ("3:2", "3:2", True),
    ("3:2", "2:3", False),
    ("11:30", "11:30", True),
    ("1/0", "5", False),
    (r"\tan 90^\circ", "5", False),
]


# Where the gold answer is a numeral, what has still to be worked out is no answer: to state the
# problem again would be paid otherwise.
CASES += [
    ("5050", r"\sum_{k=1}^{100} k", False),
    ("4", r"\log_2 16", False),
    ("120", "5!", False),
    ("120", r"\binom{10}{3}", False),
    ("3", r"\sqrt{9}", False),
    ("100", "36+64", False),
    ("6", r"2\cdot3", False),
    ("6", "2(3)", False),
    ("6", "1 2 3", False),
    ("5", "|-5|", False),
    ("-1", "i^2", False),
    ("1", r"\sin^2 x+\cos^2 x", False),
    ("0", r"\sqrt2+\sqrt3-\sqrt{5+2\sqrt6}", False),
    (r"\frac12", r"\cos 60^\circ", False),
    ("5", r"\int_0^5 dx", False),
    ("5", r"\lim_{x\to5}x", False),
    ("1024", "2^{10}", True),
    ("1000000", "10^6", True),
    ("8", r"\frac{16}{2}", True),
    ("12", "(24)/(2)", True),
    (r"\frac18", "2^{-3}", True),
    ("5", "m+n=5", True),
    ("5", "m+n=6", False),
    ("5", "2+2=5", False),
    ("7", "x=7=8", False),
    # The same for functions: the gold answer decides how far is far enough.
    (r"\frac{\pi}{6}", r"\arcsin\frac12", False),
    (r"\frac{\sqrt3}{2}", r"\sin\frac{\pi}{3}", False),
    (r"\log_2 3", r"\frac{\ln 3}{\ln 2}", True),
    (r"\sin x", r"\cos(\frac{\pi}{2}-x)", True),
    (r"3\sqrt2", r"\sqrt{18}", True),
    # Words that take it back
    ("12", r"12\text{ or maybe 13}", False),
    ("12", r"12\text{, but could be 13}", False),
    ("12", r"12\text{ or not}", False),
    ("12", "12 or maybe 13", False),
    ("7", "at least 7", False),
    ("7", "not 7", False),
    ("5", "5 or 5", False),
    ("3", r"3\pm0", False),
    ("14", r"14\text{ square units}", True),
    # Decimals that stand for something exact are rounded or cut off, and right in the last place
    (r"\pi", "3.141593", True),
    (r"\pi", "3.141592", True),
    (r"\pi", "3.141591", False),
    (r"\pi", "3.141594", False),
    (r"\frac23", "0.666667", True),
    (r"\frac23", "0.666666", True),
    (r"\frac23", "0.666668", False),
    (r"-\frac23", "-0.666667", True),
    (r"-\frac23", "-0.666668", False),
    ("e", "2.71829", False),
    # Letters
    ("n", "N", False),
    ("C", "c", True),
    ("x", "x=5", False),
    ("5", "x", False),
    ("a=5,b=6", "b=5,a=6", False),
]


@pytest.mark.parametrize(("gold", "answer", "expected"), CASES)
def test_equality(gold: str, answer: str, expected: bool) -> None:
    assert equal(gold, answer) is expected


def test_a_quick_verdict_is_never_another_one() -> None:
    decided = [(g, a, e) for g, a, e in CASES if quick(g, a) is not None]
    assert len(decided) > 40
    assert all(quick(g, a) is e for g, a, e in decided)


@pytest.mark.parametrize("gold", [g for g, _, e in CASES if e])
def test_an_answer_equals_itself(gold: str) -> None:
    assert quick(gold, gold) is True


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("xy", "yx", True),
        ("xy", r"x \cdot y", True),
        ("xyz", "zyx", True),
        ("xy", "xz", False),
        ("xy", "x+y", False),
        ("no", "on", True),  # a product of two letters, if it is no word
        ("even", "neve", False),
        ("R", "r", False),
        ("r", "R", False),
        ("R", "(R)", True),
        (r"\text{R}", "R", True),
        ("C", "c", True),  # a choice
        (r"3:00\text{ PM}", r"3:00\text{ AM}", False),
        (r"3:00\text{ p.m.}", r"3:00\text{ PM}", True),
        (r"3:00\text{ PM}", "3:00", True),
        (r"10^\circ", r"10\text{ radians}", False),
        (r"10^\circ", r"10\text{ degrees}", True),
    ],
)
def test_letters_and_units_that_were_once_misjudged(gold: str, answer: str, same: bool) -> None:
    assert equal(gold, answer) is same


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("123", "1 2 3"),
        ("123", r"1\ 2\ 3"),
        ("123", r"1\,2\,3"),
        ("35", r"3\;5"),
        ("100", r"1\,00"),
        ("1234567", "1 234 56 7"),
        ("12345", "1 2 345"),
        ("1.5", r"1\,.\,5"),
        ("12", "1\u00a02"),
        ("12", "1\n2"),
        ("12", "$1$ $2$"),
        ("12", r"\(1\)\(2\)"),
        ("12", r"1\text{ }2"),
        ("12", r"1\text{ 2}"),
        ("12", r"1\displaystyle2"),
        ("12", r"1\left.2"),
        ("12", r"1 2\text{ cm}"),
        ("x=12", "x=1 2"),
        ("x+y=12", "x+y=1 2"),
        ("x^2+12", "x^2+1 2"),
        (r"\sqrt{12}", r"\sqrt{1 2}"),
        (r"\frac{10}{3}", r"\frac{1 0}{3}"),
        ("2^{12}", "2^{1 2}"),
        ("(12,3)", "(1 2,3)"),
        ("52_8", "5 2_8"),
        ("a_{12}", "a_1 2"),
        ("23/4", "2 3/4"),
    ],
)
def test_digits_that_stand_apart_are_no_number(gold: str, answer: str) -> None:
    assert equal(gold, answer) is False
    assert equal(answer, gold) is False


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("58500", r"58\,500"),
        ("1 234 567", "1,234,567"),
        ("-1234.5", "- 1 234.5"),
        ("(1234,5)", "(1 234, 5)"),
        ("7/2", "3 1/2"),
        ("12", r"1\!2"),
        ("12", r"1\text{2}"),
        ("3+4i", "3 + 4 i"),
        ("2x", "2 x"),
        (r"\frac12", r"\displaystyle\frac12"),
        (r"x\le5", r"x\leq5"),
        (r"1\pm2x", r"1-2x, 1+2x"),
    ],
)
def test_spaces_that_mean_nothing(gold: str, answer: str) -> None:
    assert equal(gold, answer) is True


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        # words that change a number, or that are variables and no unit
        ("42", r"42\text{ dozen}", False),
        ("504", r"42\text{ dozen}", True),
        ("1450", "1450 hundred", False),
        ("1234567", "1.234567 million", True),
        (r"\$2,500,000", r"\$2.5\text{ million}", True),
        ("2500000", "2.5 million dollars", True),
        ("16", "4 squared", False),
        ("4", "4 squared", False),
        ("1", r"1\text{ half}", False),
        ("12", "12xy", False),
        ("12", "12 xy", False),
        ("12", "12 men", True),
        ("3x^3y", "3yx^3", True),
        ("70", r"70\text{71}", False),
        # units of units
        (r"60\text{ mph}", r"60\text{ km/h}", False),
        (r"60\text{ mph}", "60 miles per hour", True),
        (r"5\text{ m/s}", "5 m/s", True),
        (r"5\text{ m/s}", "5 cm/s", False),
        # money in front
        ("3.5", "\u20ac3.50", True),
        ("3.5", "\u00a33.50", True),
        ("58500", "USD 58,500", True),
        (r"\$3.50", "\u20ac3.50", False),
        # both at once is no union
        (r"(-\infty,2)\cup(3,\infty)", r"x<2 \text{ and } x>3", False),
        ("[2,5)", r"\{x : 2 \le x < 5\}", True),
        ("[2,5)", r"\{x \in \mathbb{R} \mid 2 \le x < 5\}", True),
        ("[2,5)", r"\{x : 2 \le x \le 5\}", False),
        # one thing and what it is about
        (r"\frac13", r"\frac13 \approx 0.333", True),
        (r"\frac13", r"x = \frac13 \approx 0.333", True),
        (r"\frac13", r"0.333 \approx \frac13", False),
        (r"\pi", r"x \approx 3.14159265", True),
        # ways to write
        (r"\frac34", "\u00be", True),
        (r"1\frac34", "1\u00be", True),
        (r"\frac34", "3\u20444", True),
        (r"\frac34", r"3\div4", True),
        (r"\frac34", "{3}/{4}", True),
        (r"\frac34", r"{3 \over 4}", True),
        ("58500", r"58{\,}500", True),
        ("12", r"1{\,}2", False),
        ("70", r"70\phantom{1}", True),
        ("42", r"\color{blue}{42}", True),
        ("42", r"42\quad\checkmark", True),
        ("3:30", "3{:}30", True),
        (r"\text{10:45 a.m.}", r"10:45\text{ AM}", True),
        (r"\text{10:45 a.m.}", "10:45 a.m.", True),
        (r"\text{10:45 a.m.}", "10:45 p.m.", False),
        ("52_8", "(52)_8", True),
        ("5", "|S| = 5", True),
        ("30", r"m\angle ABC = 30^\circ", True),
        ("5", r"|x| = 5", False),
        (r"\frac{n(n+1)}{2}", "0.5n^2+0.5n", True),
        (r"\frac{x}{10}", "0.1x", True),
        (r"\frac{x}{3}", "0.3333x", False),
    ],
)
def test_what_a_second_reader_found(gold: str, answer: str, same: bool) -> None:
    assert equal(gold, answer) is same


DEGREES_AND_PRIMES = [
    (r"\sin 30^\circ", "0.5", True),
    (r"\sin 30^\circ", "-0.988031624", False),
    (r"\cos 20^\circ", r"\sin 70^\circ", True),
    (r"\sin(x+30^\circ)", r"\sin(x+30)", False),
    (r"\cos 60^\circ+1", "1.5", True),
    (r"30^\circ", "30", True),
    ("f'(x)", "f'(x)", True),
    ("f'(x)", "f(x)", False),
    ("x^2", "x'^2", False),
]


@pytest.mark.parametrize(("gold", "answer", "is_equal"), DEGREES_AND_PRIMES)
def test_degrees_in_functions_and_marks_of_derivatives(
    gold: str, answer: str, is_equal: bool
) -> None:
    assert equal(gold, answer) is is_equal

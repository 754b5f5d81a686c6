r"""Whether two answers to a mathematics problem are the same: structure here, algebra by
math-verify.

`same` walks two shapes of `math_answer.read`; leaves are compared as exact numbers where both are
numerals, and otherwise read by math-verify into expressions and compared at random points with many
digits. What math-verify alone gets wrong, and which of it is put right here, is listed in
`docs/tasks.md`. The algebra may run for ever on a hostile input: it belongs into a process that can
be killed (`math_judge.py`).
"""

from __future__ import annotations

import importlib
import logging
import random
import re
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from megatron_binac.tasks.math_answer import Shape, decimals, number, read, squeeze, tight

MAX_ITEMS = 64
"""Items of a list; more are not compared."""
DIGITS = 50
"""Decimal digits of the numeric comparison."""
CLOSE = 40
"""Leading digits that have to agree."""
SIGNIFICANT = 6
"""Digits that a decimal needs to stand for a number that has no finite one."""

Leaf = Callable[[str, str], bool]


def quick(gold: str, answer: str) -> bool | None:
    """A verdict without algebra where there is one: the same string, or two plain numerals."""
    if squeeze(gold) == squeeze(answer):
        return True
    one, other = read(gold), read(answer)
    if one.kind == other.kind == "value" and None not in (number(one.text), number(other.text)):
        return same(one, other, _no_algebra)
    return None


def equal(gold: str, answer: str) -> bool:
    """Whether the answer is the gold one, with algebra where it takes any."""
    verdict = quick(gold, answer)
    return same(read(gold), read(answer), algebra) if verdict is None else verdict


def equal_pair(pair: list[str]) -> bool:
    """`equal` for a call by `killable`."""
    return equal(pair[0], pair[1])


def warm_up() -> None:
    """Import math-verify and build its tables; ImportError that names the extra."""
    try:
        math_verify = importlib.import_module("math_verify")
    except ImportError as error:
        raise ImportError(
            f"mathematics needs the package math-verify ({error}); "
            "pip install 'megatron_binac[tasks]'"
        ) from error
    # It warns that nothing bounds its time: the caller does.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    sys.setrecursionlimit(5000)
    math_verify.parse(r"$\frac{1}{2}x^2+\sqrt{3}$", parsing_timeout=None)


def _no_algebra(gold: str, answer: str) -> bool:
    return False


# Structure


def same(gold: Shape, answer: Shape, leaf: Leaf) -> bool:
    """Whether two shapes say the same; `leaf` compares two LaTeX values."""
    if gold.kind != answer.kind:
        return _across_kinds(gold, answer, leaf)
    if (
        gold.name
        and answer.name
        and gold.name != answer.name
        and gold.kind not in ("interval", "union")
    ):
        return False
    if gold.kind == "value":
        return _same_value(gold, answer, leaf)
    if gold.kind == "text":
        return bool(gold.text) and (
            gold.text == answer.text or _same_product(gold.text, answer.text)
        )
    if gold.kind in ("list", "union"):
        return _same_in_any_order(gold, answer, leaf)
    if gold.kind == "equation":
        return _same_equation(gold, answer, leaf)
    if (gold.text, gold.marks) != (answer.text, answer.marks):
        return False
    return _same_in_order(gold.parts, answer.parts, leaf)


def _same_in_order(gold: Sequence[Shape], answer: Sequence[Shape], leaf: Leaf) -> bool:
    return len(gold) == len(answer) and all(
        same(g, a, leaf) for g, a in zip(gold, answer, strict=True)
    )


def _same_in_any_order(gold: Shape, answer: Shape, leaf: Leaf) -> bool:
    if len(gold.parts) != len(answer.parts) or len(gold.parts) > MAX_ITEMS:
        return False
    if gold.kind == "union":
        gold, answer = (Shape("list", tuple(map(_open_interval, s.parts))) for s in (gold, answer))
    left = list(answer.parts)
    for item in gold.parts:
        found = next((place for place, a in enumerate(left) if same(item, a, leaf)), None)
        if found is None:
            return False
        del left[found]
    return True


def _open_interval(shape: Shape) -> Shape:
    """A pair in round brackets, where it can only mean an interval."""
    if shape.kind == "tuple" and len(shape.parts) == 2:
        return Shape("interval", shape.parts, marks="()")
    return shape


def _across_kinds(gold: Shape, answer: Shape, leaf: Leaf) -> bool:
    kinds = {gold.kind, answer.kind}
    if kinds == {"tuple", "interval"}:
        return (
            same(_open_interval(gold), _open_interval(answer), leaf)
            if _both_pairs(gold, answer)
            else False
        )
    if kinds == {"tuple", "matrix"}:
        return _same_in_order(_as_vector(gold), _as_vector(answer), leaf)
    if gold.kind == "equation" and answer.name:
        return _same_equation(gold, _as_equation(answer), leaf)
    if answer.kind == "equation":
        if gold.name and len(answer.parts) == 2:
            return _same_equation(_as_equation(gold), answer, leaf)
        return gold.kind == "value" and _chain_ends_in(answer, gold, leaf)
    if kinds == {"value", "text"}:
        if gold.kind == "value" and re.fullmatch(r"[a-z]", gold.text):
            return False  # the variable n, and not N; the choice C may be written c
        if _same_product(gold.text, answer.text):
            return True
        return squeeze(gold.text).lower() == squeeze(answer.text).lower()
    return False


def _same_product(gold: str, answer: str) -> bool:
    r"""Whether two or three letters (`xy`, `x \cdot y`) are the same factors in some order."""
    one, other = (re.sub(r"\\cdot|\\times|[\s*]", "", text) for text in (gold, answer))
    return re.fullmatch(r"[a-z]{2,3}", one) is not None and sorted(one) == sorted(other)


def _both_pairs(gold: Shape, answer: Shape) -> bool:
    return len(gold.parts) == len(answer.parts) == 2


def _as_vector(shape: Shape) -> tuple[Shape, ...]:
    """Entries of a tuple, or of a matrix with one row or one column; nothing for a wider one."""
    if shape.kind == "tuple":
        return shape.parts
    if len(shape.parts) == 1:
        return shape.parts[0].parts
    columns = {len(row.parts) for row in shape.parts}
    return tuple(row.parts[0] for row in shape.parts) if columns == {1} else ()


def _as_equation(shape: Shape) -> Shape:
    return Shape("equation", (Shape("value", text=shape.name), Shape("value", text=shape.text)))


def _same_equation(gold: Shape, answer: Shape, leaf: Leaf) -> bool:
    """Terms may change sides; a multiple is another equation: problems ask for a normal form."""
    if len(gold.parts) != len(answer.parts):
        return False
    if _same_in_order(gold.parts, answer.parts, leaf):
        return True
    if len(gold.parts) != 2:
        return False
    (g1, g2), (a1, a2) = ([part.text for part in shape.parts] for shape in (gold, answer))
    one = f"({g1})-({g2})"
    return leaf(one, f"({a1})-({a2})") or leaf(one, f"({a2})-({a1})")


def _chain_ends_in(chain: Shape, gold: Shape, leaf: Leaf) -> bool:
    r"""`x = 2+3 = 5` says 5; `8 = 7` says neither: what is no name has to be right as well.

    A sum of names (`m+n = 5`) counts as a name. Only the end has to be worked out.
    """
    sides = chain.parts
    if _NAMES.fullmatch(re.sub(r"\s", "", sides[0].text)) and sides[0].kind == "value":
        sides = sides[1:]
    return (
        len(sides) > 0
        and _same_value(gold, sides[-1], leaf)
        and all(_same_value(gold, side, leaf, worked_out=False) for side in sides[:-1])
    )


_NAMES = re.compile(r"[a-zA-Z]\w*(?:[+-][a-zA-Z]\w*)*|\\[a-zA-Z]+")


# Values


def _same_value(gold: Shape, answer: Shape, leaf: Leaf, *, worked_out: bool = True) -> bool:
    """`worked_out`: whether the answer has to be as far worked out as the gold one."""
    if answer.kind != "value":
        return same(gold, answer, leaf)
    if worked_out and not _is_worked_out(gold.text, answer.text):
        return squeeze(gold.text) == squeeze(answer.text) and gold.unit == answer.unit
    units = {gold.unit, answer.unit}
    if "%" in units and len(units) == 2 and "" in units:
        # 50 % is 50 to a problem that asks for percent, and 1/2 to one that asks for a share.
        return _close(gold.text, answer.text, leaf) or _close(_share(gold), _share(answer), leaf)
    if "" not in units and len(units) == 2:
        return False
    return _close(gold.text, answer.text, leaf)


_SIGNED = r"-?[0-9]+(?:\.[0-9]*)?"
_POWER = rf"(?:{_SIGNED}|\({_SIGNED}\))(?:\^(?:[0-9]|\{{{_SIGNED}\}}))?"
_PLAIN = re.compile(
    rf"[-+]?\(?(?:{_POWER}|\\frac\{{{_POWER}\}}\{{{_POWER}\}}"
    rf"|\(?{_POWER}\)?/\(?{_POWER}\)?)\)?"
)
_FUNCTION = re.compile(
    r"\\(?:(?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|lg|sum|prod|i*int|oint|lim|binom|gcd|lcm"
    r"|max|min|sup|inf|lfloor|lceil|floor|ceil|det|deg|bmod|pmod|mod)(?![a-zA-Z])|!"
)
_JUXTAPOSED = re.compile(r"[0-9.]\s+[0-9.]")
"""Two numerals side by side are no product."""


def _is_worked_out(gold: str, answer: str) -> bool:
    """Whether an answer is more than the problem's own expression.

    For a gold numeral it has to be a numeral too, or a power or a fraction of such ones; and it may
    name a function (sine, sum, binomial, ...) only where the gold answer names one.
    """
    if number(gold) is not None and number(answer) is None and not _is_based(answer):
        return _PLAIN.fullmatch(squeeze(answer)) is not None and not _JUXTAPOSED.search(answer)
    return _FUNCTION.search(answer) is None or _FUNCTION.search(gold) is not None


def _share(shape: Shape) -> str:
    if shape.unit != "%":
        return shape.text
    value = number(shape.text)
    return rf"\frac{{{shape.text}}}{{100}}" if value is None else _as_latex(value / 100)


def _as_latex(value: Fraction) -> str:
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def _close(gold: str, answer: str, leaf: Leaf) -> bool:
    if squeeze(gold) == squeeze(answer):
        return True
    one, other = number(gold), number(answer)
    if one is not None and other is not None:
        return one == other or _rounds_to(one, other, answer)
    based = _same_digits(gold, answer)
    return leaf(gold, answer) if based is None else based


def _rounds_to(exact: Fraction, shown: Fraction, answer: str) -> bool:
    """Whether a long decimal stands for a fraction that has no finite one."""
    places = decimals(answer)
    if places is None or places[1] < SIGNIFICANT or _is_finite(exact):
        return False
    # In units of its last place: rounded, or cut off.
    off = abs(exact - shown) * 10 ** places[0]
    return off <= Fraction(1, 2) or (off < 1 and abs(shown) <= abs(exact))


def _is_finite(value: Fraction) -> bool:
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


_BASED = re.compile(
    r"\(?([0-9A-Fa-f]+)\)?_\{?(?:\\text\{)?([0-9]+|two|three|four|five|six|seven|eight|nine)\}*"
)
_WORDS = ("two", "three", "four", "five", "six", "seven", "eight", "nine")
_BASES = {word: str(base) for base, word in enumerate(_WORDS, start=2)}


def _is_based(text: str) -> bool:
    return _BASED.fullmatch(tight(text)) is not None


def _same_digits(gold: str, answer: str) -> bool | None:
    """For numerals with a base: same digits, and same base where one is given; None for others."""
    one, other = (_BASED.fullmatch(tight(text)) for text in (gold, answer))
    if one is None:
        return None if other is None else False
    if other is None:
        return tight(answer) == one[1]
    same_base = _BASES.get(one[2], one[2]) == _BASES.get(other[2], other[2])
    return same_base and one[1].upper() == other[1].upper()


# Algebra


_PRIME = re.compile(r"'|\\prime")


def algebra(gold: str, answer: str) -> bool:
    """Whether two LaTeX expressions are equal. May take any time: the caller bounds it."""
    if _JUXTAPOSED.search(answer) or re.search(r"\\text\s*\{[^{}]*[0-9]", answer):
        return False
    # math-verify drops the marks of derivatives and of transposes.
    if _PRIME.findall(gold) != _PRIME.findall(answer):
        return False
    one, other = expression(gold), expression(answer)
    if one is None or other is None or _letters(gold) != _letters(answer):
        return False
    numeric = _numerically(one, other, answer)
    if numeric is not None:
        return numeric
    judge: Any = importlib.import_module("math_verify")
    return judge.verify(one, other, timeout_seconds=None, float_rounding=SIGNIFICANT)


def _letters(text: str) -> set[str]:
    """Variables by their letter, as math-verify reads R and r as one."""
    bare = re.sub(r"\\[a-zA-Z]+", " ", text)
    return set(re.findall(r"[a-zA-Z]", bare)) if re.search(r"[A-Z]", bare) else set()


@lru_cache(maxsize=1024)
def expression(text: str) -> Any:
    """The expression that math-verify reads, None where it reads none or not all of the text."""
    import sympy

    judge: Any = importlib.import_module("math_verify")
    config = [judge.LatexExtractionConfig(boxed_match_priority=-1)]
    found: list[Any] = judge.parse(
        f"${text}$", extraction_config=config, parsing_timeout=None, fallback_mode="no_fallback"
    )
    if len(found) != 1 or not isinstance(found[0], sympy.Basic | sympy.MatrixBase):
        return None
    # A lone i is the imaginary unit, in the gold answer and in the other one alike; a decimal is
    # the number that it shows.
    swaps: Any = {s: sympy.I for s in found[0].free_symbols if str(s) == "i"}
    swaps |= {f: sympy.Rational(str(f)) for f in found[0].atoms(sympy.Float)}
    return found[0].subs(swaps) if swaps else found[0]


def _numerically(one: Any, other: Any, answer: str) -> bool | None:
    """Equality at random points; None where that decides nothing."""
    import sympy

    if not isinstance(one, sympy.Expr) or not isinstance(other, sympy.Expr):
        return None
    if one == other:
        return True
    exact = [_rational(one), _rational(other)]
    if None not in exact:
        return exact[0] == exact[1]
    symbols: list[Any] = sorted(one.free_symbols | other.free_symbols, key=str)
    if not symbols:
        a, b = _value(one), _value(other)
        if a is None or b is None:
            return None
        return _agree(a, b) or _approximates(a, b, answer)
    rng = random.Random(0)
    judged = []
    for low in (0.2, 0.2, 0.2, 1.2, -3.0, -3.0, -3.0):
        point: Any = {
            s: sympy.Rational(round(1e6 * (low + 1.7 * rng.random())), 10**6) for s in symbols
        }
        a, b = _value(one.subs(point)), _value(other.subs(point))
        if a is None or b is None:
            continue
        # Roots and logarithms of negative numbers have branches: there both must be real to be
        # compared.
        if low > 0 or (a.imag == 0 and b.imag == 0):
            judged.append(_agree(a, b))
    return all(judged) if len(judged) >= 3 else None


def _rational(expression: Any) -> Any:
    """The exact value of a rational number however it is written (2^{100}), None for others."""
    import sympy

    if expression.free_symbols or expression.has(sympy.Float):
        return None
    found = expression.doit()
    return found if isinstance(found, sympy.Rational) else None


def _value(expression: Any) -> Any:
    """A number with `DIGITS` digits, None where the expression has no finite one."""
    import mpmath
    import sympy

    try:
        found = sympy.N(expression, DIGITS, maxn=400)
        if not found.is_number or not found.is_finite:
            return None
        parts = found.as_real_imag()
        if not all(part.is_Number for part in parts):
            return None
        # A zero that was reached by cancelling comes as noise without one valid digit.
        shown = ["0" if part.is_Float and part._prec < 10 else str(part) for part in parts]
        with mpmath.workdps(DIGITS):
            return mpmath.mpc(*shown)
    except (
        TypeError,
        ValueError,
        ArithmeticError,
        AttributeError,
        RecursionError,
        NotImplementedError,
    ):
        return None


def _agree(a: Any, b: Any) -> bool:
    import mpmath

    with mpmath.workdps(DIGITS):
        return bool(abs(a - b) <= max(abs(a), abs(b)) * mpmath.mpf(10) ** -CLOSE)


def _approximates(exact: Any, shown: Any, answer: str) -> bool:
    import mpmath

    places = decimals(answer)
    if places is None or places[1] < SIGNIFICANT or exact.imag != 0:
        return False
    with mpmath.workdps(DIGITS):
        off = abs(exact.real - shown.real) * mpmath.mpf(10) ** places[0]
        return bool(off <= 0.5 or (off < 1 and abs(shown.real) <= abs(exact.real)))

r"""Reading answers to mathematics problems: which words are the answer, and what shape it has.

Pure text work, no algebra. `extract` finds the answer in a completion, `read` turns it into a shape
(number, list, tuple, interval, matrix, equation, ...) whose leaves are LaTeX strings.
`docs/tasks.md` states the policy. Two shapes are compared by `math_equal.py`.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

MAX_ANSWER = 2000
"""Characters; a longer answer is no answer."""
MAX_DEPTH = 40
"""Nested brackets; deeper ones are refused before any parser sees them."""

Kind = Literal[
    "value", "text", "list", "tuple", "interval", "union", "matrix", "equation", "relation"
]


@dataclass(frozen=True, slots=True)
class Shape:
    r"""An answer's structure.

    Example: ``Shape("interval", (Shape("value", text="3"), Shape("value", text="4")), marks="(]")``
    """

    kind: Kind
    parts: tuple[Shape, ...] = ()
    """Items, end points, sides, or the rows of a matrix (each of them a tuple)."""
    text: str = ""
    """LaTeX of a value, the word of a text, the signs of a relation."""
    marks: str = ""
    """Brackets of an interval."""
    unit: str = ""
    """Unit of a value, in one spelling; empty where it has none."""
    name: str = ""
    """What the value was assigned to: the `x` of `x = 5`."""


# Where the answer is


def extract(text: str) -> tuple[str | None, str]:
    r"""The final answer of a completion and how it was found; None and why where there is none.

    The last \boxed counts, or else a line `#### answer`, or else "the answer is ...", or else a
    whole text that is nothing but a short answer. An unfinished box or an unfinished thought means
    that the text was cut.
    """
    if text.rfind("<think>") > text.rfind("</think>"):
        return None, "the thinking was not finished"
    said = text.rpartition("</think>")[2]
    place = max(said.rfind("\\boxed"), said.rfind("\\fbox"))
    if place >= 0:
        inside = _box(said[place:])
        if inside is None:
            return None, "the last box is not closed"
        return _accept(inside, "box")
    said = _BOLD.sub(r"\1", said)
    for pattern, how in _MARKS:
        found = pattern.findall(said)
        if found:
            return _accept(found[-1], how)
    lines = [line for line in said.strip().splitlines() if line.strip()]
    if len(lines) == 1 and len(lines[0]) <= 60 and len(lines[0].split()) <= 8:
        return _accept(lines[0], "bare")
    return None, "no box and no marked answer"


_BOLD = re.compile(r"(?<![\w)*])\*\*(?=[^\s*])([^\n]*?[^\s*])\*\*(?![\w*])")
"""Markdown's; the stars of `2**3` have digits beside them."""
_MARKS = (
    (re.compile(r"^#{4}\s*(.+?)\s*$", re.MULTILINE), "####"),
    (
        re.compile(
            r"\b(?:final\s+)?answer\s*(?:(?:is|(?:should|would|must|has\s+to)\s+be)"
            r"(?:\s+(?:therefore|thus|then|simply|just|indeed))?\b|:)\s*:?\s*(.+?)"
            r"\s*(?:,?\s(?:because|since)\b|\.\s|\.?$)",
            re.IGNORECASE | re.MULTILINE,
        ),
        "answer is",
    ),
)


def _accept(found: str, how: str) -> tuple[str | None, str]:
    if not found.strip():
        return None, f"an empty answer ({how})"
    if len(found) > MAX_ANSWER:
        return None, f"an answer of {len(found)} characters ({how})"
    return re.sub(r"^#{2,}\s*(?=\S)", "", found.strip()), how


def _box(text: str) -> str | None:
    r"""What stands in the \boxed{...} that `text` begins with; None where it is not closed."""
    rest = re.sub(r"^\\[bf]+ox(?:ed)?\s*", "", text)
    if not rest.startswith("{"):
        found = re.match(r"[-+]?\w+", rest)
        return found[0] if found else None
    depth, escaped = 0, False
    for place, sign in enumerate(rest):
        if escaped:
            escaped = False
            continue
        escaped = sign == "\\"
        depth += (sign == "{") - (sign == "}")
        if depth == 0:
            return rest[1:place]
    return None


# One spelling for what means the same

_SIGNS = {
    "\u2212": "-", "\u2013": "-", "\u2014": "-", "\u00d7": r"\times ", "\u00b7": r"\cdot ",
    "\u22c5": r"\cdot ", "\u03c0": r"\pi ", "\u03b8": r"\theta ", "\u221e": r"\infty ",
    "\u2264": r"\le ", "\u2265": r"\ge ", "\u2260": r"\ne ", "\u222a": r"\cup ",
    "\u2208": r"\in ", "\u00b0": r"^\circ ", "\u00b1": r"\pm ", "\u221a": r"\sqrt ",
    "\u27e8": r"\langle ", "\u27e9": r"\rangle ", "\u2124": r"\mathbb{Z}", "\u211d": r"\mathbb{R}",
    "\u2205": r"\emptyset ", "\u00a2": r"\text{ cents}", "\u20ac": r"\text{ euros}",
    "\u2248": r"\approx ", "\u00b2": "^2", "\u00b3": "^3", "\u2044": "/", "\u00a3": r"\pounds ",
}  # fmt: skip
_REPLACED: tuple[tuple[str, str], ...] = (
    # Order matters: new rows first, as they look like spaces; then spaces, sizes and fonts,
    # operators. A command ends where its letters do: \b stands for that, also before a digit.
    (r"\\\\(?:\[[0-9.]+ *(?:em|pt|ex|mm|cm)\])?", r"\\cr "),
    (r"\\[()\[\]]", " "),
    (r"\\!\s*", ""),
    (r"\\(?:text)?color\b\s*\{[^{}]*\}|\\checkmark\b", ""),
    (r"\\[hv]?phantom\b\s*\{[^{}]*\}", " "),
    (r"\\[,;:> ]|~|\\q?quad\b|\\hspace\{[^{}]*\}|\\ ", " "),
    (r"\\(?:left|right|bigl?|bigr?|Bigl?|Bigr?|biggl?|biggr?)\b\.?", " "),
    (r"\\(?:displaystyle|textstyle|limits|nolimits)\b", " "),
    (r"\\[dtc](frac|binom)\b", r"\\\1"),
    (r"\\(?:leqslant|leq)\b|<=", r"\\le "),
    (r"\\(?:geqslant|geq)\b|>=", r"\\ge "),
    (r"\\lt\b", "<"),
    (r"\\gt\b", ">"),
    (r"\\neq\b|!=", r"\\ne "),
    (r"\\(?:varnothing|empty)\b|\\\{\s*\\\}", r"\\emptyset "),
    (r"\\(?:lbrace)\b", r"\\{"),
    (r"\\(?:rbrace)\b", r"\\}"),
    (r"\\(?:lbrack)\b", "["),
    (r"\\(?:rbrack)\b", "]"),
    (r"\\(?:textdegree|degree)\b|\^\s*\{\s*\\circ\s*\}|\^\s*o\b", r"^\\circ "),
    (r"\\(?:mathbb|mathbf|mathds)\s*\{?\s*R\s*\}?|\\R\b|\\Reals?\b", r"\\mathbb{R}"),
    (
        r"\\(?:mathrm|operatorname|textrm|textit|textbf|textsf|texttt|mbox|hbox|textnormal|rm|bf)\b",
        r"\\text",
    ),
    (r"\\(?:mathbf|boldsymbol|bm|mathit|mathsf)\b", ""),
    (r"\\text\s*\{\s*\}", " "),
    (r"\*\*(?=\S)(.*?\S)\*\*", r"\1"),
    (r"\*\*", "^"),
    (r"(?<=[0-9])\{([,:])\}(?=[0-9])", r"\1"),
    (r"(?<=[0-9])\{ +\}(?=[0-9])", " "),
    (r"(?<=[0-9])\s*([ap])\.\s?m\b\.?", r" \1m"),
    (r"\\div\b", "/"),
    (r"^\{([^{}]+)\}\s*/\s*\{([^{}]+)\}$", r"\\frac{\1}{\2}"),
    (r"^\{?([^{}]+)\\over\b([^{}]+)\}?$", r"\\frac{\1}{\2}"),
    (r"\\(?:approx|simeq)\b\s*", r"\\approx "),
)
_COMPILED = tuple(
    (re.compile(pattern.replace(r"\b", "(?![a-zA-Z])")), new) for pattern, new in _REPLACED
)


def clean(text: str) -> str:
    """One spelling: no delimiters, spacing, sizes and fonts; braces around every argument."""
    out = unicodedata.normalize("NFC", text.strip())
    out = "".join(_SIGNS.get(sign, sign) for sign in out)
    out = _VULGAR.sub(_fraction, out)
    # Digits of other scripts and of full width are the same digits.
    out = "".join(str(unicodedata.decimal(sign, sign)) for sign in out)
    if len(re.findall(r"(?<!\\)\$", out)) > 1:
        # In pairs they enclose a formula; one alone is money.
        out = re.sub(r"(?<!\\)\$", " ", out)
    for pattern, new in _COMPILED:
        out = pattern.sub(new, out)
    out = re.sub(r"\\boxed\s*\{(.*)\}", r"\1", out)
    out = _plain_words(out)
    out = re.sub(r"\\(frac|binom)\s*([0-9a-zA-Z])\s*([0-9a-zA-Z])", r"\\\1{\2}{\3}", out)
    out = re.sub(r"\\(frac|binom)\s*([0-9a-zA-Z])\s*\{", r"\\\1{\2}{", out)
    out = re.sub(r"\\(frac|binom)\s*(\{[^{}]*\})\s*([0-9a-zA-Z])", r"\\\1\2{\3}", out)
    out = re.sub(r"\\sqrt\s*([0-9a-zA-Z])", r"\\sqrt{\1}", out)
    out = re.sub(r"\s+", " ", out).strip()
    return re.sub(r"(?<!\\)[.;,:]+$", "", out).strip()


_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")


def _fraction(found: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", found[0]).partition("\u2044")
    return rf"\frac{{{top}}}{{{bottom}}}"


def _plain_words(text: str) -> str:
    """Answers that were typed rather than typeset: sqrt(2), pi, 2*x, inf."""
    out = re.sub(r"(?<![\\a-zA-Z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    out = re.sub(r"(?<![\\a-zA-Z])(pi|theta|infty)(?![a-zA-Z])", r"\\\1 ", out)
    out = re.sub(r"(?<![\\a-zA-Z])(?:infinity|inf|oo)(?![a-zA-Z])", r"\\infty ", out)
    out = re.sub(r"(?<![\\a-zA-Z])(sin|cos|tan|cot|sec|csc|ln|log|exp)(?=\s*\()", r"\\\1", out)
    return re.sub(r"(?<=[\w)}])\s*\*\s*(?=[\w(\\])", r" \\cdot ", out)


def squeeze(text: str) -> str:
    """For comparison as strings: no spaces but between digits, no needless braces."""
    out = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", clean(text))
    return re.sub(r"([\^_])\{([0-9a-zA-Z])\}", r"\1\2", tight(out))


def tight(text: str) -> str:
    """Without spaces, but those that keep two numerals apart: `1 2` is not 12, `1 200` is 1200."""
    return re.sub(r"(?<![0-9.])\s+|\s+(?![0-9.])", "", _SPACED.sub(_without_spaces, text))


_SPACED = re.compile(r"(?<![\d.,])(?<![\d.,] )[0-9]{1,3}(?: [0-9]{3})+(?![\d,]| [\d.])")
"""Groups of three digits, all of them."""


def _without_spaces(found: re.Match[str]) -> str:
    return found[0].replace(" ", "")


# What shape it has

_OPEN, _CLOSE = "([{", ")]}"
_NAME = re.compile(
    r"(?:[a-zA-Z](?:_\{?\w+\}?)?'*|\\(?:[a-zA-Z]+)|\\text\{[^{}]*\}"
    r"|[a-zA-Z]{2,}(?: [a-zA-Z]+){0,3}|\|[A-Z]+\||(?:m|\\text\{m\})?\s*\\angle\s*[A-Z]{1,3})"
    r"(?:\s*\(\s*\\?[\w, ]+\s*\))?"
)
_RELATIONS = re.compile(r"(\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|\\ne(?![a-zA-Z])|<|>)")
_AND = re.compile(
    r"\\text\s*\{\s*(?:,?\s*and|,?\s*or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])|\\lor|\\vee(?![a-zA-Z])|\\land"
)
_BOTH = re.compile(
    r"\\text\s*\{\s*,?\s*and\s*\}|(?<![a-zA-Z\\])and(?![a-zA-Z])|\\land(?![a-zA-Z])"
)
_SET_OF = re.compile(
    r"^\\\{\s*([a-zA-Z])\s*(?:\\in\s*\\mathbb\{R\}\s*)?(?::|\\mid(?![a-zA-Z])|\|)(.*)\\\}$"
)
_LEAD = re.compile(
    r"^\s*(?:\\text\s*\{)?\s*(?:(?:so|thus|hence|therefore),?\s+)?(?:the\s+)?(?:final\s+)?answer\s*(?:is|:|=)?\s*:?\s*\}?\s*(?=\S)",
    re.IGNORECASE,
)
_MATRIX = re.compile(r"^\\begin\{([pbvBV]?matrix|array)\}(?:\{[^{}]*\})?(.*)\\end\{\1\}$")


def read(text: str) -> Shape:
    """The shape of an answer. Never raises: what has no shape known here is a text."""
    cleaned = _LEAD.sub("", clean(text)) or clean(text)
    if _depth(cleaned) > MAX_DEPTH:
        return Shape("text", text=squeeze(text)[:MAX_ANSWER])
    shape = _read(cleaned)
    values = _both_signs(shape)
    return shape if len(values) == 1 else Shape("list", tuple(values))


def _depth(text: str) -> int:
    deepest = depth = 0
    for sign in text:
        depth += (sign in _OPEN) - (sign in _CLOSE)
        deepest = max(deepest, depth)
    return deepest


def _read(text: str) -> Shape:
    text = _unwrapped(text.strip())
    if not text:
        return Shape("text")
    joined = _joined_thousands(text)
    parts = _split(_AND.sub(",", joined), ",;")
    if len(parts) > 1:
        found = _list(parts)
        if found.kind == "union" and _BOTH.search(joined):
            # Both at once is what they have in common, and no union.
            return Shape("list", found.parts)
        return found
    exact, _, rounded = (side.strip() for side in joined.partition(r"\approx"))
    if exact and rounded:
        # `x = 1/3 \approx 0.333` says 1/3, `x \approx 0.333` says 0.333.
        return _read(f"{exact} = {rounded}" if _NAME.fullmatch(exact) else exact)
    text = joined
    pieces = _split_on(text, r"\cup")
    if len(pieces) > 1:
        return Shape("union", tuple(_read(piece) for piece in pieces))
    bare, name = _without_name_in(text)
    relation = _relation(bare)
    if relation is not None:
        return relation
    sides = [side.strip() for side in _split(bare, "=")]
    if len(sides) > 1 and all(sides):
        return _equation(sides)
    inside = _read_brackets(bare)
    if inside is not None:
        return inside
    return _read_value(bare, name)


def _list(parts: list[str]) -> Shape:
    """Items side by side; inequalities ("x < 2 or x > 3") are the union of their intervals."""
    items: list[Shape] = []
    for part in parts:
        if part.strip():
            shape = _read(part)
            items += shape.parts if shape.kind == "list" else _both_signs(shape)
    if len(items) == 1:
        return items[0]
    if len(items) > 1 and all(item.kind in ("interval", "union") and item.name for item in items):
        return Shape("union", tuple(items))
    return Shape("list", tuple(items))


_PLUS_MINUS = re.compile(r"\\pm(?![a-zA-Z])")


def _both_signs(shape: Shape) -> list[Shape]:
    """`a \\pm b` as its two values."""
    if shape.kind == "value" and _PLUS_MINUS.search(shape.text):
        signed = (_PLUS_MINUS.sub(sign, shape.text) for sign in "+-")
        return [Shape("value", text=text, unit=shape.unit) for text in signed]
    return [shape]


def _equation(sides: list[str]) -> Shape:
    if _NAME.fullmatch(sides[0]) and len(sides) == 2:
        right = _read(sides[1])
        if right.kind in ("value", "text", "tuple", "interval", "union", "matrix"):
            return _named(right, sides[0])
        if right.kind == "list":
            return right
    return Shape("equation", tuple(_read_value(side, "") for side in sides))


def _named(shape: Shape, name: str) -> Shape:
    return Shape(shape.kind, shape.parts, shape.text, shape.marks, shape.unit, squeeze(name))


def _without_name_in(text: str) -> tuple[str, str]:
    pieces = _split_on(text, r"\in")
    if len(pieces) == 2 and _NAME.fullmatch(pieces[0].strip()):
        return pieces[1].strip(), squeeze(pieces[0])
    return text, ""


def _relation(text: str) -> Shape | None:
    r"""A chain of < and \le: an interval of one name where it is one, else as it stands."""
    if not _RELATIONS.search(text) or any(
        _depth_at(text, m.start()) for m in _RELATIONS.finditer(text)
    ):
        return None
    pieces = [piece.strip() for piece in _RELATIONS.split(text)]
    sides, signs = pieces[::2], pieces[1::2]
    if not all(sides):
        return Shape("text", text=squeeze(text))
    if signs[0] in (">", r"\ge") and all(sign in (">", r"\ge") for sign in signs):
        turned = {">": "<", r"\ge": r"\le"}
        sides, signs = sides[::-1], [turned[sign] for sign in signs[::-1]]
    found = _as_interval(sides, signs)
    if found is not None:
        return found
    return Shape("relation", tuple(_read_value(side, "") for side in sides), text=" ".join(signs))


def _as_interval(sides: list[str], signs: list[str]) -> Shape | None:
    if any(sign not in ("<", r"\le") for sign in signs):
        return None
    low, high = Shape("value", text=r"-\infty"), Shape("value", text=r"\infty")
    names = [
        bool(_NAME.fullmatch(side)) and r"\infty" not in side and r"\pi" not in side
        for side in sides
    ]
    if len(sides) == 3 and names == [False, True, False]:
        low, high, name = _read_value(sides[0], ""), _read_value(sides[2], ""), sides[1]
        marks = ("(" if signs[0] == "<" else "[") + (")" if signs[1] == "<" else "]")
    elif len(sides) == 2 and names == [True, False]:
        high, name, marks = _read_value(sides[1], ""), sides[0], "()" if signs[0] == "<" else "(]"
    elif len(sides) == 2 and names == [False, True]:
        low, name, marks = _read_value(sides[0], ""), sides[1], "()" if signs[0] == "<" else "[)"
    else:
        return None
    return Shape("interval", (low, high), marks=marks, name=squeeze(name))


def _read_brackets(text: str) -> Shape | None:
    matrix = _MATRIX.match(text)
    if matrix:
        kind = matrix[1]
        rows = [row for row in re.split(r"\\cr(?![a-zA-Z])", matrix[2]) if row.strip()]
        cells = tuple(Shape("tuple", tuple(_read(cell) for cell in row.split("&"))) for row in rows)
        # Bars make it a determinant, which is a number and not the array.
        return Shape("matrix", cells, text="determinant" if kind in ("vmatrix", "Vmatrix") else "")
    if text in (r"\mathbb{R}", r"\text{all real numbers}", "all real numbers", "all reals"):
        ends = (Shape("value", text=r"-\infty"), Shape("value", text=r"\infty"))
        return Shape("interval", ends, marks="()")
    for opening, closing in ((r"\{", r"\}"), (r"\langle", r"\rangle")):
        if text.startswith(opening) and text.endswith(closing):
            inside = text[len(opening) : -len(closing)]
            condition = _SET_OF.match(text)
            if condition:
                shape = _read(condition[2])
                good = shape.kind in ("interval", "union")
                return _named(shape, "") if good and _names_of(shape) == {condition[1]} else None
            if opening == r"\{" and ("|" in inside or r"\mid" in inside or ":" in inside):
                return None
            items = _split(inside, ",")
            return _list(items) if opening == r"\{" else Shape("tuple", tuple(map(_read, items)))
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and _closes_at_end(text):
        items = _split(text[1:-1], ",")
        if len(items) == 1:
            return None
        parts = tuple(_read(item) for item in items)
        if len(items) == 2 and (text[0] == "[" or text[-1] == "]" or _has_infinity(text)):
            return Shape("interval", parts, marks=text[0] + text[-1])
        return Shape("tuple", parts) if text[0] == "(" and text[-1] == ")" else None
    return None


def _names_of(shape: Shape) -> set[str]:
    return {part.name for part in shape.parts} if shape.kind == "union" else {shape.name}


def _has_infinity(text: str) -> bool:
    return r"\infty" in text


def _unwrapped(text: str) -> str:
    """Without a pair of braces, or of brackets around one item, that encloses all of it."""
    while len(text) > 1 and text[0] in "{(" and text[-1] in "})" and _closes_at_end(text):
        if text[0] == "(" and (len(_split(text[1:-1], ",")) > 1 or text[-2:] == r"\}"):
            return text
        text = text[1:-1].strip()
    return text


def _closes_at_end(text: str) -> bool:
    depth = 0
    for place, sign in enumerate(text):
        if place and text[place - 1] == "\\" and sign in "{}":
            continue
        depth += (sign in _OPEN) - (sign in _CLOSE)
        if depth == 0:
            return place == len(text) - 1
    return False


def _depth_at(text: str, end: int) -> int:
    return sum((s in _OPEN) - (s in _CLOSE) for s in text[:end])


def _split(text: str, signs: str) -> list[str]:
    """At the top level only: outside all brackets and environments."""
    parts, depth, start, place = [], 0, 0, 0
    while place < len(text):
        if text.startswith((r"\begin", r"\langle"), place):
            depth += 1
        elif text.startswith((r"\end{", r"\rangle"), place):
            depth -= 1
        sign = text[place]
        depth += (sign in _OPEN) - (sign in _CLOSE)
        if sign in signs and depth == 0:
            parts.append(text[start:place])
            start = place + 1
        place += 1
    return [*parts, text[start:]]


def _split_on(text: str, command: str) -> list[str]:
    """At a LaTeX command. Half-open intervals do not balance, so depth is not asked."""
    return [part.strip() for part in re.split(re.escape(command) + r"(?![a-zA-Z])", text)]


_THOUSANDS = re.compile(r"(?<![\d.,])[0-9]{1,3}(?:,[0-9]{3})+(?![\d,])")


def _joined_thousands(text: str) -> str:
    r"""1,234,567 and 1 234 567 as one number; inside brackets a comma separates."""
    if any(sign in text for sign in "([") and r"\text" not in text:
        return text
    text = _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)
    return _SPACED.sub(_without_spaces, text)


# Values and their units

_UNITS: dict[str, str] = {
    spelling: unit
    for unit, spellings in {
        "degree": "degree degrees deg", "%": "percent percents pct", "dollar": "dollar dollars usd",
        "cent": "cent cents", "euro": "euro euros",
        "mm": "mm millimeter millimeters", "cm": "cm centimeter centimeters centimetre centimetres",
        "m": "m meter meters metre metres", "km": "km kilometer kilometers kilometre kilometres",
        "inch": "in inch inches", "foot": "ft foot feet", "yard": "yd yard yards",
        "mile": "mi mile miles", "second": "s sec second seconds", "minute": "min minute minutes",
        "hour": "h hr hrs hour hours", "day": "day days", "week": "week weeks",
        "month": "month months", "year": "yr year years", "g": "g gram grams",
        "kg": "kg kilogram kilograms", "mile/hour": "mph", "km/hour": "kmh kph",
        "pound": "lb lbs pound pounds",
        "ounce": "oz ounce ounces", "L": "l liter liters litre litres",
        "mL": "ml milliliter milliliters", "am": "am", "pm": "pm",
        "radian": "rad radian radians",
    }.items()
    for spelling in spellings.split()
}  # fmt: skip
_POWERS = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
_UNIT_END = re.compile(
    r"^(?P<value>.*?(?:[0-9})!]|\\pi|\\infty))\s*"
    r"(?P<unit>(?:\\text\s*\{[^{}0-9]*\}|(?<![a-zA-Z\\])[a-zA-Z]{2,}(?:[ /][a-zA-Z]+)*)"
    r"(?:\s*\^\s*\{?\s*[0-9]\s*\}?)?)\.?$"
)
_HEDGE = re.compile(
    r"\b(?:or|not|but|maybe|perhaps|else|unless|wrong|false|possibly|either|squared|cubed"
    r"|hal(?:f|ves)|(?:third|fifth|sixth|seventh|eighth|ninth|tenth|hundredth|thousandth)s?)\b",
    re.IGNORECASE,
)
"""Words that take a value back, or change it: what they stand in is no unit."""
_SCALES = {
    "dozen": 12, "hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9,
    "trillion": 10**12,
}  # fmt: skip
_MONEY = re.compile(
    r"^(-?)\s*(?:\\text\s*\{\s*)?(\\?\$|US\s*\\?\$|USD|EUR|GBP|euros|\\pounds)(?![a-zA-Z])\s*\}?\s*"
    r"(?=-?[0-9.]|\\frac)"
)
_COINS = {"EUR": "euro", "euros": "euro", "GBP": "sterling", r"\pounds": "sterling"}
_LONE_UNIT = re.compile(
    r"^(?P<value>[-+]?[0-9.,]+)\s+"
    r"(?P<unit>[mgshlLNJWVK](?:/[a-zA-Z]+)?(?:\s*\^\s*\{?[23]\}?)?)$"
)


_TRIG = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_DEGREES = re.compile(r"([0-9]+(?:\.[0-9]+)?|[a-zA-Z])\s*\^\s*\\circ")


def _read_value(text: str, name: str) -> Shape:
    text = _unwrapped(re.sub(r"^\\approx\s*", "", text.strip()))
    if _TRIG.search(text):
        # There a degree is part of the value: the sine of 30 degrees is not that of 30.
        text = _DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", text)
    words = re.fullmatch(r"\\text\s*\{([^{}]*[0-9][^{}]*)\}", text)
    if words:
        text = words[1].strip()
    unit = ""
    money = _MONEY.match(text)
    if money:
        text = money[1] + text[money.end() :]
        unit = _COINS.get(money[2], "dollar")
    marked = re.fullmatch(
        r"(.*?[^\s\\^])\s*(\\?%|\^\s*\\circ|\\?\$|\\pounds)\s*(?:[CF]|\\text\{[CF]\})?", text
    )
    if marked:
        text = marked[1]
        mark = marked[2]
        unit = "%" if "%" in mark else "dollar" if "$" in mark else _COINS.get(mark, "degree")
    else:
        found = _UNIT_END.match(text) or _LONE_UNIT.match(text)
        if found and _is_unit(found["value"], found["unit"], text):
            text, own = _scaled(found["value"].strip(), found["unit"])
            unit = unit or own
    text = text.strip()
    word = _word(text)
    if word is not None:
        return Shape("text", text=word, name=name)
    return Shape("value", text=_number_text(text), unit=unit, name=name)


def _is_unit(value: str, unit: str, text: str) -> bool:
    """Whether the end of a value is a unit or a noun, and no product of variables (`3xy`)."""
    if _HEDGE.search(unit) or re.search(r"\\(?:text|begin)", value):
        return False
    if unit.startswith("\\") or _unit(unit):
        return True
    return text[len(value)] == " " and re.match(r"[a-zA-Z]{3}", unit) is not None


def _scaled(value: str, unit: str) -> tuple[str, str]:
    """A value with its unit; `2 million` is 2000000."""
    words = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", unit).split()
    scale = _SCALES.get(words[0].lower()) if words else None
    if scale is None:
        return value, _unit(unit)
    exact = number(_number_text(value))
    if exact is None:
        return rf"({value})\cdot {scale}", _unit(" ".join(words[1:]))
    exact *= scale
    whole = exact.denominator == 1
    text = str(exact) if whole else rf"\frac{{{exact.numerator}}}{{{exact.denominator}}}"
    return text, _unit(" ".join(words[1:]))


def _unit(text: str) -> str:
    """One spelling of a unit; words that are none (apples) all count as no unit."""
    flat = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text).lower().replace(".", "").strip()
    power = "".join(re.findall(r"\^\s*\{?\s*([0-9])", flat))
    over = [_UNITS.get(part) for part in re.split(r"\s*/\s*|\s+per\s+", flat)]
    if len(over) == 2 and None not in over:
        return "/".join(map(str, over))
    words = re.findall(r"[a-z%]+", flat)
    if words and words[0] in _POWERS:
        power, words = _POWERS[words[0]][1], words[1:]
    if len(words) != 1 or words[0] not in _UNITS:
        return ""
    return _UNITS[words[0]] + (f"^{power}" if power else "")


def _word(text: str) -> str | None:
    r"""A text answer in small letters (`\text{Evelyn}`, `even`, `(C)`); None for formulas.

    A letter alone is a choice up to H, and behind that a variable, whose case counts.
    """
    whole = re.fullmatch(
        r"\\text\s*\{([^{}]*)\}|([a-zA-Z]{2,}(?:[ -][a-zA-Z]+)*)|\(?([A-H])\)?", text
    )
    if whole is None:
        return None
    words = next(group for group in whole.groups() if group is not None)
    return re.sub(r"[^0-9a-z]+", " ", words.lower()).strip() or None


def _number_text(text: str) -> str:
    r"""5.0 stays, `1\frac{4}{5}` becomes a sum, `.5` gets its zero, `6.02e23` its power of ten."""
    out = re.sub(r"(?<![0-9])\.(?=[0-9])", "0.", text)
    out = re.sub(r"^([-+]?[0-9.]+)[eE]([-+]?[0-9]+)$", r"\1\\times 10^{\2}", out)
    mixed = re.fullmatch(r"(-?)\s*([0-9]+)\s*\\frac\{([0-9]+)\}\{([0-9]+)\}", out)
    spaced = re.fullmatch(r"(-?)\s*([0-9]+)\s+([0-9]+)/([0-9]+)", out)
    if mixed or spaced:
        sign, whole, top, bottom = (mixed or spaced).groups()  # type: ignore[union-attr]
        return rf"{sign}({whole}+\frac{{{top}}}{{{bottom}}})"
    return out


_DECIMAL = r"[0-9]+(?:\.[0-9]*)?"
_FRACTION = re.compile(
    rf"(-?)\s*(?:\\frac\{{\s*(-?)\s*({_DECIMAL})\s*\}}\{{\s*(-?)\s*({_DECIMAL})\s*\}}|({_DECIMAL})\s*/\s*({_DECIMAL}))"
)
_POWER_OF_TEN = re.compile(
    rf"(-?{_DECIMAL})\s*(?:\\times|\\cdot)\s*10\s*\^\s*(?:\{{\s*(-?[0-9]{{1,3}})\s*\}}|([0-9]))"
)
_REPEATING = re.compile(r"(-?)([0-9]*)\.([0-9]*)\\(?:overline|bar)\s*\{([0-9]+)\}")
_MIXED = re.compile(r"(-?)\(([0-9]+)\+\\frac\{([0-9]+)\}\{([0-9]+)\}\)")


def number(text: str) -> Fraction | None:
    """The exact value of a plain numeral, None where it is any other expression."""
    text = text.strip().replace("{,}", ",")
    if re.fullmatch(r"[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?", text):
        text = text.replace(",", "")
    if re.fullmatch(rf"[-+]?\s*{_DECIMAL}", text):
        return Fraction(re.sub(r"[\s+]", "", text).rstrip("."))
    found = _FRACTION.fullmatch(text)
    if found:
        top, bottom = found[3] or found[6], found[5] or found[7]
        sign = (-1) ** sum(bool(found[i]) for i in (1, 2, 4))
        value = Fraction(bottom.rstrip("."))
        return None if value == 0 else sign * Fraction(top.rstrip(".")) / value
    found = _POWER_OF_TEN.fullmatch(text)
    if found:
        return Fraction(found[1].rstrip(".")) * Fraction(10) ** int(found[2] or found[3])
    found = _REPEATING.fullmatch(text)
    if found:
        fixed, cycle = found[3], found[4]
        whole = Fraction(int((found[2] or "0") + fixed), 10 ** len(fixed))
        tail = Fraction(int(cycle), (10 ** len(cycle) - 1) * 10 ** len(fixed))
        return (-1 if found[1] else 1) * (whole + tail)
    found = _MIXED.fullmatch(text)
    if found and int(found[4]):
        value = int(found[2]) + Fraction(int(found[3]), int(found[4]))
        return -value if found[1] else value
    return None


def decimals(text: str) -> tuple[int, int] | None:
    """(digits behind the point, significant digits) of a decimal with a point, else None."""
    found = re.fullmatch(r"-?\s*([0-9]+)\.([0-9]+)", text.strip())
    if found is None:
        return None
    return len(found[2]), len((found[1] + found[2]).lstrip("0"))

"""Prompts in, grades out: tasks by name, each imported when it is built, none with torch."""

from __future__ import annotations

import difflib
import inspect
import types
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron_binac.tasks.base import Task

ENTRY_POINT_GROUP = "megatron_binac.tasks"

BUILDERS: dict[str, str] = {
    "checksum": "megatron_binac.tasks.checksum:Checksum",
    "math": "megatron_binac.tasks.math:build_math",
    "math500": "megatron_binac.tasks.math:build_math500",
    "gsm8k": "megatron_binac.tasks.math:build_gsm8k",
    "aime": "megatron_binac.tasks.math:build_aime",
    "code": "megatron_binac.tasks.code:build_code",
    "mbpp": "megatron_binac.tasks.code:build_mbpp",
    "mbpp_sanitized": "megatron_binac.tasks.code:build_mbpp_sanitized",
    "mbpp_plus": "megatron_binac.tasks.code:build_mbpp_plus",
    "humaneval": "megatron_binac.tasks.code:build_humaneval",
    "choice": "megatron_binac.tasks.choice:build_choice",
    "gpqa": "megatron_binac.tasks.choice:build_gpqa",
    "arc": "megatron_binac.tasks.choice:build_arc",
    "mmlu_pro": "megatron_binac.tasks.choice:build_mmlu_pro",
    "reasoning_gym": "megatron_binac.tasks.reasoning_gym:ReasoningGym",
}
"""Name -> "module:callable". Another distribution adds tasks by entry points of the same form."""


def task_names() -> list[str]:
    """Every task that `build_task` knows, those of other distributions included."""
    return sorted({*BUILDERS, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def build_task(name: str, **options: Any) -> Task:
    """Make a task; ValueError, with the closest name, for a task or an option it does not know, and
    for an option that it cannot do without."""
    check_task(name, options)
    return _builder(name)(**options)


def check_task(name: str, options: Mapping[str, Any]) -> None:
    """ValueError, with the closest name, for a task or an option that is not there, for one that is
    missing, and for one of the wrong kind."""
    builder = _builder(name)
    names = _option_names(builder)
    for option in options:
        if names is not None and option not in names:
            raise ValueError(f"task {name} has no option {option!r}; {_closest(option, names)}")
    try:
        inspect.signature(builder).bind(**options)
    except TypeError as error:
        raise ValueError(
            f"task {name}: {error}; give it in task.options of a config, or as --set OPTION=VALUE"
        ) from error
    hints = _option_hints(builder)
    for option, value in options.items():
        if option in hints and not _fits(value, hints[option]):
            raise ValueError(
                f"task {name} got {option} = {value!r}, expected {_said(hints[option])}"
            )


def task_class(name: str) -> type | None:
    """What a task is an instance of; None where its builder does not say."""
    return _class_made(_builder(name))


def task_options(name: str) -> list[str] | None:
    """Options of a task by name; None where it takes any."""
    return _option_names(_builder(name))


def _option_names(builder: Any) -> list[str] | None:
    """Keyword arguments of a builder; None where it takes any.

    A function with `**options` passes them to the class that it returns: its keyword-only arguments
    count.
    """
    found = inspect.signature(builder).parameters.values()
    names = [p.name for p in found if p.kind is not p.VAR_KEYWORD]
    if len(names) == len(found):
        return names
    made = None if inspect.isclass(builder) else _class_made(builder)
    if made is None:
        return None
    passed = inspect.signature(made).parameters.values()
    return [*names, *(p.name for p in passed if p.kind is p.KEYWORD_ONLY and p.name not in names)]


def _option_hints(builder: Any) -> dict[str, Any]:
    """Types of options by name, as far as the builder (and what it returns) gives them."""
    hints: dict[str, Any] = {}
    for made in (_class_made(builder), builder):
        call = made.__init__ if inspect.isclass(made) else made
        hints |= {} if call is None else get_type_hints(call)
    return hints


def _fits(value: Any, hint: Any) -> bool:
    """Whether a plain value is of a type; True for types that no plain value has."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, kind) for kind in inner)
    if origin is Literal:
        return value in inner
    if origin in (list, tuple, Sequence):
        listed = isinstance(value, list | tuple)
        return listed and all(_fits(v, inner[0]) for v in value) if inner else listed
    if origin in (dict, Mapping):
        return isinstance(value, Mapping)
    if hint is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (bool, str, type(None)):
        return isinstance(value, hint)
    return True


def _said(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(_said, inner))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin in (list, tuple, Sequence):
        return f"a list, each {_said(inner[0])}" if inner else "a list"
    if origin in (dict, Mapping):
        return "an object"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
    return words.get(hint) or ("null" if hint is type(None) else str(hint))


def _class_made(builder: Any) -> type | None:
    made = builder if inspect.isclass(builder) else get_type_hints(builder).get("return")
    return made if inspect.isclass(made) else None


def _builder(name: str) -> Any:
    if name in BUILDERS:
        module, _, attribute = BUILDERS[name].partition(":")
        return getattr(import_module(module), attribute)
    points: list[EntryPoint] = list(entry_points(group=ENTRY_POINT_GROUP, name=name))
    if not points:
        raise ValueError(f"there is no task {name!r}; {_closest(name, task_names())}")
    if len({point.value for point in points}) > 1:
        raise ValueError(
            f"task {name!r} is offered by {sorted(p.value for p in points)}; uninstall all but one"
        )
    return points[0].load()


def _closest(got: str, names: list[str]) -> str:
    near = difflib.get_close_matches(got, names, n=1, cutoff=0.0)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known are {', '.join(names) or 'none'}"

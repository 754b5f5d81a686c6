"""Prompts in, grades out: tasks by name, each imported when it is built, none with torch."""

from __future__ import annotations

import difflib
import inspect
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from megatron_binac.tasks.base import Task

ENTRY_POINT_GROUP = "megatron_binac.tasks"

BUILDERS: dict[str, str] = {
    "checksum": "megatron_binac.tasks.checksum:Checksum",
}
"""Name -> "module:callable". Another distribution adds tasks by entry points of the same form."""


def task_names() -> list[str]:
    """Every task that `build_task` knows, those of other distributions included."""
    return sorted({*BUILDERS, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def build_task(name: str, **options: Any) -> Task:
    """Make a task; ValueError, with the closest name, for a task or an option it does not know."""
    builder = _builder(name)
    allowed = [p for p in inspect.signature(builder).parameters.values() if p.name != "self"]
    if not any(p.kind is p.VAR_KEYWORD for p in allowed):
        names = [p.name for p in allowed]
        for option in options:
            if option not in names:
                raise ValueError(f"task {name} has no option {option!r}; {_closest(option, names)}")
    return builder(**options)


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

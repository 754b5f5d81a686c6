"""Building tasks by name, and by the entry points of other distributions."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

import megatron_binac.tasks as tasks
from megatron_binac.tasks.checksum import Checksum


def offer(monkeypatch: pytest.MonkeyPatch, *points: tuple[str, str]) -> None:
    """Pretend that installed distributions offer these (name, value) entry points."""
    made = [EntryPoint(name=n, value=v, group=tasks.ENTRY_POINT_GROUP) for n, v in points]

    def entry_points(*, group: str, name: str | None = None) -> list[EntryPoint]:
        assert group == "megatron_binac.tasks"
        return [p for p in made if name in (None, p.name)]

    monkeypatch.setattr(tasks, "entry_points", entry_points)


def test_a_task_is_built_with_its_options():
    task = tasks.build_task("checksum", num_digits=4, seed=7)
    assert task == Checksum(num_digits=4, seed=7)
    assert len(task.prompt("train", 0).text) == 4


def test_every_known_task_can_be_looked_up():
    assert "checksum" in tasks.task_names()
    for name in tasks.BUILDERS:
        assert callable(tasks._builder(name))


def test_an_unknown_name_names_the_closest():
    with pytest.raises(ValueError, match=r"no task 'checksun'; did you mean 'checksum'\?"):
        tasks.build_task("checksun")


def test_an_unknown_option_names_the_closest():
    with pytest.raises(ValueError, match=r"no option 'num_digit'; did you mean 'num_digits'\?"):
        tasks.build_task("checksum", num_digit=4)


BAD_KINDS = [
    ("math", {"seconds": "abc"}, "got seconds = 'abc', expected a number"),
    ("mbpp", {"memory_mb": "x"}, "got memory_mb = 'x', expected an integer"),
    ("mbpp", {"workers": 1.5}, "got workers = 1.5, expected an integer or null"),
    ("mbpp", {"partial": 1}, "got partial = 1, expected true or false"),
    ("mbpp", {"isolation": "none"}, "expected 'auto' or 'namespaces' or 'limits'"),
    ("mbpp", {"packages": "numpy"}, "got packages = 'numpy', expected a list, each text"),
    ("choice", {"eval_data": "x", "seed": "x"}, "got seed = 'x', expected an integer"),
    ("choice", {"eval_data": "x", "shuffle": 5}, "got shuffle = 5, expected true or false"),
    ("choice", {"eval_data": 7}, "got eval_data = 7, expected text or null"),
    ("math", {"eval_data": "x", "columns": "gold"}, "got columns = 'gold', expected an object"),
    ("checksum", {"num_digits": "4"}, "got num_digits = '4', expected an integer"),
]


@pytest.mark.parametrize(("name", "options", "message"), BAD_KINDS)
def test_an_option_of_the_wrong_kind_is_refused(name: str, options: dict, message: str):
    with pytest.raises(ValueError, match=f"task {name} got") as found:
        tasks.build_task(name, **options)
    assert message in str(found.value)


def test_another_distribution_can_offer_a_task(monkeypatch: pytest.MonkeyPatch):
    offer(monkeypatch, ("parity", "megatron_binac.tasks.checksum:Checksum"))
    assert tasks.task_names() == sorted([*tasks.BUILDERS, "parity"])
    assert tasks.build_task("parity", num_digits=3) == Checksum(num_digits=3)
    with pytest.raises(ValueError, match="did you mean 'parity'"):
        tasks.build_task("parities")


def test_two_distributions_with_one_name_are_refused(monkeypatch: pytest.MonkeyPatch):
    offer(monkeypatch, ("parity", "one:Task"), ("parity", "other:Task"))
    with pytest.raises(ValueError, match="uninstall all but one"):
        tasks.build_task("parity")


def test_building_a_procedural_task_loads_no_heavy_package():
    code = (
        "import sys; from megatron_binac.tasks import build_task;"
        "build_task('checksum').prompt('train', 0);"
        "print([m for m in ('torch', 'sentencepiece', 'reasoning_gym') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_option_that_a_task_needs_is_named() -> None:
    with pytest.raises(ValueError, match=r"task reasoning_gym: missing a required .*dataset"):
        tasks.build_task("reasoning_gym")

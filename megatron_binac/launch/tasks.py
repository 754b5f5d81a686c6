"""Plain functions that NeMo-Run's tasks call on each rank; they need no NeMo-Run themselves.

No argument may have a name that begins with "run": NeMo-Run's command line takes it for its own.
Without `from __future__ import annotations`, for the reason in `nemo_cli`.
"""

import runpy
import sys
from collections.abc import Sequence


def train(recipe: str, folder: str, settings: list[str] = []) -> None:  # noqa: B006
    """Train a recipe in a run folder, or go on with it; on every rank of the job."""
    flags = [part for text in settings for part in ("--set", text)]
    _binac(["train", recipe, "--run-dir", folder, *flags])


def evaluate(folder: str, output: str) -> None:
    """Measure the newest checkpoint of a run; on every rank of the job."""
    _binac(["eval", folder, "--output", output])


def report(folders: list[str], out: str) -> None:
    """Tables and curves of runs; one process."""
    _binac(["report", *folders, "--out", out])


def _binac(argv: Sequence[str]) -> None:
    """`python -m megatron_binac ARGV` in this process, so that it gets the signals of its rank.

    Raises SystemExit where it fails.
    """
    before = sys.argv
    sys.argv = ["binac", *argv]
    try:
        runpy.run_module("megatron_binac", run_name="__main__", alter_sys=True)
    except SystemExit as error:
        if error.code:
            raise
    finally:
        sys.argv = before

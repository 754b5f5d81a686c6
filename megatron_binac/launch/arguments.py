"""The arguments of `binac launch`, `status`, `logs`, `cancel` and `resume`: argparse alone."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_binac.arguments import positive, whole

EXECUTORS = ("local", "torchrun", "slurm")


def add_arguments(name: str, parser: argparse.ArgumentParser) -> None:
    """The arguments of one of the five commands."""
    if name == "launch":
        _launch_arguments(parser)
        return
    text = "its folder, its NeMo-Run id or title; default: the newest"
    parser.add_argument("experiment", nargs="?", metavar="EXPERIMENT", help=text)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="site whose records to search")
    if name == "status":
        parser.add_argument("--json", action="store_true")
        parser.add_argument("--watch", type=positive, metavar="S", help="again every S seconds")
        parser.add_argument("--stacks", action="store_true", help="where every rank stands")
    elif name == "logs":
        parser.add_argument("--stage", metavar="NAME")
        parser.add_argument("--tail", type=whole(0), metavar="N", help="last N lines of each log")
    elif name == "cancel":
        parser.add_argument("--now", action="store_true", help="without a last checkpoint")
    else:
        parser.add_argument("--dry-run", action="store_true", help="say what would be submitted")


def _launch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipes", nargs="+", metavar="RECIPE", help="see `binac recipes`")
    text = "default: slurm with a profile, else torchrun for several ranks, else local"
    parser.add_argument("--executor", choices=EXECUTORS, help=text)
    parser.add_argument("--profile", type=Path, metavar="FILE", help="the site, a TOML file")
    parser.add_argument("--nodes", type=whole(1), default=1, metavar="N")
    parser.add_argument(
        "--ranks-per-node", type=whole(1), metavar="N", help="instead of the profile's"
    )
    text = "further nodes for vLLM servers, by role: actor=1,critic=1"
    parser.add_argument("--servers", metavar="ROLE=N,...", help=text)
    parser.add_argument("--time", metavar="LIMIT", help="of one job, instead of the profile's")
    parser.add_argument(
        "--port", type=whole(1, 65535), metavar="P", help="meeting point of the ranks"
    )
    parser.add_argument("--name", metavar="NAME", help="of the experiment; default the recipes")
    text = "folder of the experiment; default WORKDIR/runs/NAME. One that is there is gone on with"
    parser.add_argument("--dir", type=Path, metavar="DIR", help=text)
    text = "all stages: warm starts, training, evaluation, benchmark, report, comparison"
    parser.add_argument("--chain", action="store_true", help=text)
    parser.add_argument("--stages", metavar="A,B", help="some of them; default train")
    parser.add_argument("--seeds", metavar="1,2,3", help="every recipe with each of these seeds")
    text = "every recipe with each of these values (repeatable)"
    parser.add_argument("--sweep", action="append", default=[], metavar="KEY=V,V", help=text)
    text = "jobs that the training may take one after the other, where requeues are not allowed"
    parser.add_argument("--jobs", type=whole(1), default=1, metavar="N", help=text)
    text = "change one setting of every recipe (repeatable)"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    parser.add_argument("--allow-dirty", action="store_true", help="send the last commit anyway")
    parser.add_argument("--dry-run", action="store_true", help="write scripts and configs only")
    parser.add_argument("--wait", action="store_true", help="return when the last job has ended")

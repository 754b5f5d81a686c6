"""A benchmark of a workload on the ranks that are there, or on some that torchrun starts for it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_binac.benchmark.workload import workload_config
from megatron_binac.config import Config
from megatron_binac.first_rank import on_first
from megatron_binac.models.parallel import start_distributed


def under_ranks(
    args: argparse.Namespace,
    own: Sequence[str],
    measure: Callable[[Config, Path], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
) -> int:
    """Measure the workload of `args` in a folder that all ranks see; the exit code.

    `args` has workload, set, nproc and json; `own` are the arguments of `binac bench` that were
    parsed into it, for the ranks that --nproc asks for.
    """
    config = workload_config(args.workload, args.set)
    if args.nproc and args.nproc > 1 and not dist.is_torchelastic_launched():
        config.check_world(args.nproc)
        ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        ranks += [f"--nproc-per-node={args.nproc}", "-m", "megatron_binac", "bench"]
        return subprocess.run([*ranks, *_without_nproc(own)], check=False).returncode
    start_distributed()
    config.check_world(dist.get_world_size())
    with tempfile.TemporaryDirectory() as temporary:
        result = measure(config, Path(on_first(lambda: temporary)))
        dist.barrier()
    if dist.get_rank() == 0:
        if args.json:
            print(json.dumps(result, indent=2))
        else:
            show(result)
    dist.destroy_process_group()
    return 0


def _without_nproc(argv: list[str]) -> list[str]:
    out = []
    skip = False
    for item in argv:
        if skip or item.startswith("--nproc="):
            skip = False
            continue
        if item == "--nproc":
            skip = True
            continue
        out.append(item)
    return out

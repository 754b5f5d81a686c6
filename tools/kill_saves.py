#!/usr/bin/env python3
"""Kill a training job at random moments of its saves and look at what is left, many times.

One process writes checkpoints one after the other, as a run does (every second one in the
background with --background); this one kills it with SIGKILL after a random time and then checks
that there is a whole checkpoint, that it is not older than what was reported as saved, and that
its numbers are those of its step.

    tools/kill_saves.py --kills 50
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def learner() -> object:
    from megatron_binac.config import ModelConfig, ParallelConfig, RoleConfig
    from megatron_binac.models.learner import MegatronLearner
    from megatron_binac.models.parallel import build_groups, start_distributed

    start_distributed()
    config = RoleConfig(
        model=ModelConfig(
            num_layers=4, hidden_size=256, ffn_hidden_size=704, max_sequence_length=64
        )
    )
    groups = build_groups("actor", ParallelConfig(), 1)
    return MegatronLearner(
        "actor", config, groups, vocab_size=320, seed=1, num_steps=10, temperature=1.0
    )


def set_weights(made: object, step: int) -> None:
    """Weights that say which step they belong to."""
    import torch

    with torch.no_grad():
        for number, p in enumerate(made.parameters()):
            p.fill_(step + number / 64)


def write_forever(folder: Path, background: bool) -> None:
    """Save step after step, each on top of the newest good one; says when a step begins and when
    its save is over."""
    from megatron_binac.models import checkpoint

    made = learner()
    found = checkpoint.newest_good(folder, set_aside=True)
    step = 0 if found is None else int(found.name[5:])
    beside = checkpoint.Background() if background else None
    while True:
        step += 1
        set_weights(made, step)
        print(f"begin {step}", flush=True)
        checkpoint.save(folder, step, {"actor": made}, {}, keep=2, background=beside)
        if beside is not None:
            set_weights(made, -1)  # what is trained on meanwhile must not end up in the file
            beside.settle(wait=True)
        print(f"saved {step}", flush=True)


def killed_once(folder: Path, background: bool, wait: float) -> tuple[int, str]:
    """Start the writer, kill it `wait` seconds after its first save began; what it had reported as
    saved, and what the kill has left."""
    command = [sys.executable, __file__, "--write", str(folder)]
    command += ["--background"] if background else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        assert first.startswith("begin"), f"the writer ended: {first!r}"
        time.sleep(wait)
    finally:
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split("\n")
        process.wait()
    saved = [int(line[6:]) for line in rest if line.startswith("saved ")]
    left = sorted(p.name for p in folder.iterdir() if p.name.startswith("."))
    kind = "amid a draft" if any(n.startswith(".step") for n in left) else "between two saves"
    return max(saved, default=0), kind


def main() -> int:
    """Returns 0 where a good checkpoint was there after every kill."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--longest", type=float, default=1.5, help="seconds from a save to a kill")
    parser.add_argument("--background", action="store_true", help="only saves in the background")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write is not None:
        write_forever(args.write, args.background)
    from megatron_binac.models import checkpoint

    made, draw = learner(), random.Random(args.seed)
    counted: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory(prefix="kill_saves") as name:
        folder, newest = Path(name), 0
        for number in range(args.kills):
            background = args.background or number % 2 == 1
            saved, kind = killed_once(folder, background, draw.uniform(0.0, args.longest))
            counted[f"{kind}{', in the background' if background else ''}"] += 1
            newest = max(newest, saved)
            found = checkpoint.newest_good(folder, set_aside=False)
            step = 0 if found is None else int(found.name[5:])
            assert step >= newest, f"kill {number + 1}: step {newest} was saved, {step} is there"
            newest = step
            if found is not None:
                checkpoint.load(found, {"actor": made})
                for place, p in enumerate(made.parameters()):
                    assert (p == step + place / 64).all(), f"kill {number + 1}: other numbers"
    print(f"{args.kills} kills, a whole checkpoint after each (step {newest} at the end):")
    for kind, times in sorted(counted.items()):
        print(f"  {times:3} {kind}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

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
import contextlib
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SERVER = multiprocessing.get_context("forkserver")
"""Writers are forked from a process that has imported what they need."""


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


def write_forever(folder: Path, background: bool, say: Connection) -> None:
    """Save step after step, each on top of the newest good one; says when a step begins and when
    its save is over."""
    from megatron_binac.models import checkpoint

    os.setpgid(0, 0)  # what it forks to write is killed with it
    made = learner()
    found = checkpoint.newest_good(folder, set_aside=True)
    step = 0 if found is None else int(found.name[5:])
    beside = checkpoint.Background() if background else None
    while True:
        step += 1
        set_weights(made, step)
        say.send(("begin", step))
        checkpoint.save(folder, step, {"actor": made}, {}, keep=2, background=beside)
        if beside is not None:
            set_weights(made, -1)  # what is trained on meanwhile must not end up in the file
            beside.settle(wait=True)
        say.send(("saved", step))


def seconds_of_a_save(folder: Path) -> float:
    """How long saves take here and now, so that kills come amid them."""
    hear, say = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=write_forever, args=(folder, False, say))
    process.start()
    try:
        times = []
        while len(times) < 6:  # three saves: begin, saved
            hear.recv()
            times.append(time.monotonic())
    finally:
        process.kill()
        process.join()
    return (times[-1] - times[0]) / 3


def killed_once(folder: Path, background: bool, wait: float) -> tuple[int, str]:
    """Start the writer, kill it `wait` seconds after its first save began; what it had reported as
    saved, and what the kill has left."""
    hear, say = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=write_forever, args=(folder, background, say))
    process.start()
    say.close()
    saved = 0
    try:
        assert hear.poll(300), "the writer does not begin"
        assert hear.recv()[0] == "begin"
        time.sleep(wait)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.kill()
        process.join()
    with contextlib.suppress(EOFError):
        while True:
            what, step = hear.recv()
            saved = max(saved, step if what == "saved" else 0)
    left = sorted(p.name for p in folder.iterdir() if p.name.startswith("."))
    kind = "amid a draft" if any(n.startswith(".step") for n in left) else "between two saves"
    return saved, kind


def main() -> int:
    """Returns 0 where a good checkpoint was there after every kill."""
    from megatron_binac.arguments import whole

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=whole(1), default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--background", action="store_true", help="only saves in the background")
    args = parser.parse_args()
    SERVER.set_forkserver_preload(["megatron_binac.models.checkpoint"])
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = str(ROOT)
    from megatron_binac.models import checkpoint

    made, draw = learner(), random.Random(args.seed)
    counted: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory(prefix="kill_saves") as name:
        folder = Path(name)
        longest = 4.0 * seconds_of_a_save(folder)
        newest = int(checkpoint.newest_good(folder, set_aside=False).name[5:])
        for number in range(args.kills):
            background = args.background or number % 2 == 1
            saved, kind = killed_once(folder, background, draw.uniform(0.0, longest))
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
    print(f"{args.kills} kills within {longest:.1f} s, a whole checkpoint after each:")
    for kind, times in sorted(counted.items()):
        print(f"  {times:3} {kind}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

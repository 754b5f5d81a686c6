"""What grading beside sampling saves: a rollout of fixed work whose answers are programs that run.

Sampling is real: the workload `long`, answers of recorded lengths. A fresh model writes no
program, so that each answer is judged as one that computes a while, in the code tasks' sandbox.
The same steps are played in turn with nothing to run, with the grades begun after the last answer,
as for an engine that does not tell what has ended, and as answers end. The last two find the same
grades, which is checked. No more can be saved than the shorter of sampling and grading takes.

    python tools/bench_grading.py --repeats 5 --rounds 500000
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from megatron_binac.benchmark import workload
from megatron_binac.models.parallel import start_distributed
from megatron_binac.rollout.megatron_engine import MegatronEngine
from megatron_binac.rollout.play import play
from megatron_binac.tasks.base import Task
from megatron_binac.tasks.code import CodeTask
from megatron_binac.types import Grade, Prompt


class Programs:
    """A task whose every answer is judged by running a program of so many rounds."""

    name = "programs"

    def __init__(self, judge: CodeTask, rounds: int) -> None:
        self.judge, self.rounds = judge, rounds
        self.workers = judge.workers
        self.problem = judge.prompt("eval", 0)

    def grade(self, prompt: Prompt, text: str) -> Grade:
        odd = len(text) % 2
        program = f"def f(x):\n    for _ in range({self.rounds}): x ^= 1\n    return x + {odd}\n"
        return self.judge.grade(self.problem, f"```python\n{program}```")


def code_task(folder: Path, workers: int) -> CodeTask:
    """One problem of this tool's own."""
    row = {"id": "one", "text": "Return the number.", "tests": "assert f(4) == 4", "names": ["f"]}
    return CodeTask("programs", lambda split: [row], workers=workers, cpu_seconds=60.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=500_000, help="of each program")
    parser.add_argument("--workers", type=int, default=1, help="programs at the same time")
    args = parser.parse_args()
    torch.set_num_threads(1)
    start_distributed()
    config = workload.workload_config("long")
    with tempfile.TemporaryDirectory() as folder:
        load = workload.build("long", config, Path(folder))
        judge = code_task(Path(folder), args.workers)
        task: Task = Programs(judge, args.rounds)  # type: ignore[assignment]
        engine = load.players.actor
        assert isinstance(engine, MegatronEngine)
        seconds: dict[str, list[float]] = {"nothing to run": [], "after": [], "beside": []}
        for step in range(args.repeats + 1):
            prompts = load.cursor.take(config.rollout.prompts_per_step)
            scores = {}
            for name, times in seconds.items():
                engine.tells_endings = name == "beside"  # type: ignore[misc]
                own = load.players.task if name == "nothing to run" else task
                start = time.perf_counter()
                trees = play(replace(load.players, task=own), prompts, config.rollout, step)
                if step:  # the first one warms up, and starts the sandbox
                    times.append(time.perf_counter() - start)
                scores[name] = [y.reward for tree in trees for y in tree.attempts]
            assert scores["after"] == scores["beside"], "the grades differ"
        judge.close()
    median = {name: statistics.median(times) for name, times in seconds.items()}
    grading = median["after"] - median["nothing to run"]
    most = min(grading, median["nothing to run"])
    saved = median["after"] - median["beside"]
    result = {"answers": len(scores["after"]), "seconds": median, "saved": saved}
    result |= {"saved_of_what_can_be": saved / most}
    print(json.dumps(result | {"all_seconds": seconds}, indent=2))


if __name__ == "__main__":
    main()

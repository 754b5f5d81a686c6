"""`binac bench scaling`: predict a step on two ranks from steps on one, then measure it.

A phase of a step costs a + b x prompts on one rank: two sizes give a and b. Two data-parallel ranks
then each have half the prompts; what they say to each other is what the prediction lacks, and shows
as its error. Weak scaling is twice the prompts on twice the ranks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_binac.arguments import Parser, whole
from megatron_binac.benchmark.workload import WORKLOADS, workload_config


@dataclass(frozen=True, kw_only=True, slots=True)
class Straight:
    """Seconds of a phase by the prompts of a rank."""

    fixed: float
    each: float

    @staticmethod
    def through(few: tuple[int, float], many: tuple[int, float]) -> Straight:
        """The line through two measurements; a floor below 0 is noise and taken as 0."""
        each = (many[1] - few[1]) / (many[0] - few[0])
        fixed = few[1] - each * few[0]
        if fixed < 0:
            return Straight(fixed=0.0, each=many[1] / many[0])
        return Straight(fixed=fixed, each=max(each, 0.0))

    def at(self, prompts: float) -> float:
        return self.fixed + self.each * prompts


def measure(workload: str, prompts: int, ranks: int, repeats: int, sets: Sequence[str]) -> Any:
    """One `binac bench step`, as JSON."""
    command = [sys.executable, "-m", "megatron_binac", "bench", "step", "--json"]
    command += ["--workload", workload, "--nproc", str(ranks), "--repeats", str(repeats)]
    for item in (f"rollout.prompts_per_step={prompts}", *sets):
        command += ["--set", item]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout[done.stdout.index("{") :])


def predict(few: Any, many: Any, prompts: tuple[int, int], share: float, clock: str) -> float:
    """Seconds of a step in which each rank has `share` prompts, without what ranks say to each
    other."""
    total = 0.0
    for name, entry in many["phases"].items():
        line = Straight.through(
            (prompts[0], few["phases"][name][clock]), (prompts[1], entry[clock])
        )
        total += line.at(share) * entry["times_a_step"]
    return total


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, predict, compare; the exit code."""
    parser = Parser(prog="binac bench scaling", description=__doc__)
    parser.add_argument("--workload", choices=tuple(WORKLOADS), default="quickstart_grpo")
    parser.add_argument("--repeats", type=whole(1), default=10, metavar="N")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    prompts = workload_config(args.workload, args.set).rollout.prompts_per_step
    half = prompts // 2

    def run(count: int, ranks: int) -> Any:
        return measure(args.workload, count, ranks, args.repeats, args.set)

    few, many = run(half, 1), run(prompts, 1)
    between, two, weak = run(3 * prompts // 4, 1), run(prompts, 2), run(2 * prompts, 2)
    rows = []
    for clock, key in (("seconds", "step_seconds"), ("cpu_seconds", "step_cpu_seconds")):
        for what, share, found in (
            (f"1 rank, {3 * prompts // 4} prompts", 3 * prompts // 4, between),
            (f"2 ranks, {prompts} prompts", half, two),
            (f"2 ranks, {2 * prompts} prompts", prompts, weak),
        ):
            expected = predict(few, many, (half, prompts), share, clock)
            rows.append(
                {
                    "what": what,
                    "clock": "wall" if clock == "seconds" else "CPU of a rank",
                    "predicted": expected,
                    "measured": found[key],
                    "error": expected / found[key] - 1.0,
                }
            )
    result = {
        "benchmark": "scaling",
        "workload": args.workload,
        "calibrated_on": [half, prompts],
        "rows": rows,
        "weak_scaling": {
            "wall": many["step_seconds"] / weak["step_seconds"],
            "CPU of a rank": many["step_cpu_seconds"] / weak["step_cpu_seconds"],
        },
    }
    if args.json:
        print(json.dumps(result, indent=2))
        return 0
    print(f"calibrated on 1 rank with {half} and {prompts} prompts of {args.workload}")
    for row in rows:
        print(
            f"{row['what']:26} {row['clock']:14} predicted {1e3 * row['predicted']:8.1f} ms, "
            f"measured {1e3 * row['measured']:8.1f} ms, error {row['error']:+.1%}"
        )
    for clock, value in result["weak_scaling"].items():
        print(f"weak scaling 1 -> 2 ranks, {clock}: {value:.0%}")
    return 0

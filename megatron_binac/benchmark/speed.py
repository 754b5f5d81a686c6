"""`binac bench train | rollout | step`: seconds, tokens and FLOPs of fixed work, measured.

Every number that is printed was measured in this call; what was not is left out. Times are medians
over repeats after a warm-up, with the quartiles beside them. Run under torchrun (or with --nproc)
for more ranks: then each rank's own phase times are compared as well.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_binac.arguments import Parser, whole
from megatron_binac.benchmark.machine import (
    PeakMemory,
    describe,
    energy_joules,
    measured_peak_flops,
    profiled_shares,
)
from megatron_binac.benchmark.under_ranks import under_ranks
from megatron_binac.benchmark.workload import WORKLOADS, Workload, build
from megatron_binac.models import checkpoint, cpu
from megatron_binac.models.learner import work_of
from megatron_binac.planner import flops
from megatron_binac.planner.flops import Work
from megatron_binac.rollout.batch import actor_turns, sequences
from megatron_binac.rollout.play import generated_tokens, play, replay
from megatron_binac.rollout.work import sampling_work
from megatron_binac.timeline import Timeline
from megatron_binac.types import TrainSequence, Tree, Turn

PHASES = {
    "train": ("follow", "lead"),
    "rollout": ("play",),
    "step": ("play", "follow", "probe", "lead", "refit"),
}
"""What each benchmark reports of a step."""


class Meter:
    """Seconds, work and memory of the phases of repeated steps."""

    def __init__(self, load: Workload, timeline: Timeline | None) -> None:
        self.load, self.timeline = load, timeline
        self.seconds: dict[str, list[float]] = {}
        self.cpu_seconds: dict[str, list[float]] = {}
        """Of this process, where there is no GPU: what a busy machine does not change."""
        self.model_flops: dict[str, list[int]] = {}
        self.executed: dict[str, list[int]] = {}
        self.memory: dict[str, int] = {}
        self.steps: list[float] = []
        """Seconds of all phases of each repeat together."""
        self._probe = PeakMemory()

    def phase(self, name: str, action: Callable[[], Any]) -> Any:
        """Run `action`, charge its time to `name`."""
        self._probe.reset()
        _sync()
        start, start_cpu = time.perf_counter_ns(), time.process_time()
        with self.timeline.phase(name) if self.timeline else nullcontext():
            result = action()
            _sync()
        self.seconds.setdefault(name, []).append((time.perf_counter_ns() - start) / 1e9)
        if not torch.cuda.is_available():
            self.cpu_seconds.setdefault(name, []).append(time.process_time() - start_cpu)
        peak = self._probe.read()
        if peak is not None:
            self.memory[name] = max(self.memory.get(name, 0), peak)
        return result

    def count(self, phase: str, role: str, work: Work, executed: Work, training: bool) -> None:
        """Add the FLOPs of a pass to a phase of this step."""
        learner = self.load.learners[role]
        recompute = learner.config.parallel.recompute == "full"
        once = flops.training_flops if training else flops.forward_flops
        model = once(learner.shape, work)
        run = flops.executed_flops(learner.shape, executed, training=training, recompute=recompute)
        for table, value in ((self.model_flops, model), (self.executed, run)):
            table.setdefault(phase, []).append(value)

    def forget(self) -> None:
        """End of the warm-up."""
        self.keep(lambda name: False)
        self.steps.clear()

    def keep(self, wanted: Callable[[str], bool]) -> None:
        """Drop the phases that are not wanted."""
        tables = (self.seconds, self.cpu_seconds, self.model_flops, self.executed, self.memory)
        for table in tables:
            for name in [name for name in table if not wanted(name)]:
                del table[name]


def _sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rollout_phase(meter: Meter, step: int) -> list[Tree]:
    """Attempts, feedbacks and revisions of one step, graded."""
    load = meter.load
    prompts = load.cursor.take(load.config.rollout.prompts_per_step)
    return meter.phase("play", lambda: play(load.players, prompts, load.config.rollout, step))


def count_sampling(
    meter: Meter, phase: str, trees: list[Tree], *, probes: bool = False
) -> tuple[int, int]:
    """FLOPs of sampling by role; tokens that have to go through the layers, and how many did not.
    What it needs reads each different prompt whole; what it runs reads what prompts begin with
    alike once, and not again what the engine still holds."""
    needed = left_out = 0
    for role, work in sampling_work(trees, probes=probes).items():
        if not work.tokens:
            continue
        engine = getattr(meter.load.players, role)
        spared = engine.take_spared()
        counts = torch.tensor([spared.tokens, spared.pairs], device=cpu.device())
        dist.all_reduce(counts, group=engine.learner.groups.collection.dp)
        tokens, pairs = counts.tolist()
        executed = replace(work, tokens=work.tokens - tokens, pairs=work.pairs - pairs)
        meter.count(phase, role, work, executed, training=False)
        needed, left_out = needed + work.tokens, left_out + tokens
    return needed, left_out


def train_phase(meter: Meter, phase: str, role: str, turns: list[Turn]) -> tuple[int, int]:
    """One update on all turns, whatever they earned; real and stored tokens of the packed rows."""
    # Which turns have credit depends on luck; a benchmark that skipped some would not repeat.
    for i, turn in enumerate(turns):
        turn.trainable, turn.advantage = True, 1.0 if i % 2 else -1.0
    rows = sequences(turns)
    learner = meter.load.learners[role]
    loss = learner.config.loss
    meter.phase(phase, lambda: learner.update(rows, loss))
    real, executed, stored = _update_work(learner, rows)
    passes = [(real, executed, True)]
    if loss.kl_coef > 0:
        passes.append((real, executed, False))
    for needed, run, training in passes:
        meter.count(phase, role, needed, run, training)
    return real.tokens, stored


def _update_work(learner: Any, rows: Sequence[TrainSequence]) -> tuple[Work, Work, int]:
    """What an update needs and what it runs over all ranks: padded tokens, padded squares; with
    shared prefixes the distinct tokens. What it needs counts every turn alone, as if none did."""
    real = work_of(rows)
    plan = learner.plan(rows)
    stored = sum(len(batch.ids_T) for batch in plan)
    computed = slots = 0
    for batch in plan:
        if batch.shared is not None:
            computed += len(batch.shared.ids_D)
            slots += batch.shared.batches.num_pairs
            continue
        computed += len(batch.ids_T)
        lengths = [b - a for a, b in zip(batch.bounds, batch.bounds[1:], strict=False)]
        groups: dict[int, list[int]] = {}
        for n in lengths:
            groups.setdefault(max(8, 1 << max(n - 1, 0).bit_length()), []).append(n)
        slots += sum(max(g) * (max(g) + 1) // 2 * len(g) for g in groups.values())
    counts = torch.tensor([stored, computed, slots], device=cpu.device())
    dist.all_reduce(counts, group=learner.groups.collection.dp)
    stored, computed, pairs = counts.tolist()
    return real, Work(tokens=computed, pairs=pairs, scored=real.scored), stored


def one_step(meter: Meter, what: str, step: int, totals: list[dict[str, int]]) -> None:
    """One repeat: everything that `what` needs, of which only its own phases are reported."""
    load = meter.load
    rollout = load.config.rollout
    began = {name: len(values) for name, values in meter.seconds.items()}
    trees = rollout_phase(meter, step)
    counts = {"generated": generated_tokens(trees), "trained": 0, "real": 0, "stored": 0}
    counts["sampling"], counts["spared"] = count_sampling(meter, "play", trees)

    def learn(phase: str, role: str, turns: list[Turn]) -> None:
        learner, engine = load.learners[role], getattr(load.players, role)
        real, stored = train_phase(meter, phase, role, turns)
        counts["real"] += real
        counts["stored"] += stored
        counts["trained"] += sum(len(t.ids) for t in turns)
        meter.phase("refit", lambda: engine.publish(learner.num_updates))

    if what != "rollout":
        learn("follow", "actor", list(actor_turns(trees, load.config.bilevel)[0]))
        if trees[0].feedbacks and _trains(load.config, "critic"):
            if what == "step":
                meter.phase("probe", lambda: replay(load.players, trees, rollout, step))
                needed, left_out = count_sampling(meter, "probe", trees, probes=True)
                counts["sampling"] += needed
                counts["spared"] += left_out
                counts["generated"] += generated_tokens(trees, probes=True)
            learn("lead", "critic", [t for tree in trees for t in tree.turns("feedback")])
    totals.append(counts)
    own = PHASES[what]
    meter.steps.append(
        sum(
            sum(values[began.get(name, 0) :])
            for name, values in meter.seconds.items()
            if name in own
        )
    )


def _trains(config: Any, role: str) -> bool:
    own = getattr(config, role)
    return own is not None and own.train


def summarise(
    meter: Meter, totals: list[dict[str, int]], args: argparse.Namespace
) -> dict[str, Any]:
    """Medians, rates and shares of this call, the same keys for table and JSON."""
    world = dist.get_world_size()
    mine = {name: statistics.median(values) for name, values in meter.seconds.items()}
    everyone: list[dict[str, float]] = [{} for _ in range(world)]
    dist.all_gather_object(everyone, mine)
    busy: list[dict[str, float]] = [{} for _ in range(world)]
    own = {name: statistics.median(values) for name, values in meter.cpu_seconds.items()}
    dist.all_gather_object(busy, own)
    peaks: list[dict[str, int]] = [{} for _ in range(world)]
    dist.all_gather_object(peaks, meter.memory)
    peak = measured_peak_flops(meter.load.learners["actor"].config.precision)
    repeats = args.repeats
    per_step = meter.steps
    whole = statistics.median(per_step)
    phases: dict[str, dict[str, Any]] = {}
    for name, values in meter.seconds.items():
        entry: dict[str, Any] = {
            "times_a_step": len(values) / repeats,
            "seconds": mine[name],
            "quartiles": _quartiles(values),
            "slowest_rank": max(range(world), key=lambda r, n=name: everyone[r].get(n, 0.0)),
            "slowest_over_mean": max(e[name] for e in everyone)
            / statistics.fmean(e[name] for e in everyone),
        }
        if name in meter.cpu_seconds:
            entry["cpu_seconds"] = own[name]
            if world > 1 and torch.get_num_threads() == 1:
                # What a rank waits for: the pipeline's bubble, collectives, a core.
                worked = sum(b[name] for b in busy) / sum(e[name] for e in everyone)
                entry["idle_share"] = max(0.0, 1.0 - worked)
        if name in meter.model_flops and peak is not None:
            each, run = (
                sum(table[name]) / len(values) for table in (meter.model_flops, meter.executed)
            )
            entry |= {
                "model_flops": each,
                "mfu": each / (mine[name] * peak.flops * world),
                "hfu": run / (mine[name] * peak.flops * world),
            }
        found = [p[name] for p in peaks if name in p]
        if found:
            entry["peak_bytes"] = max(found)
        phases[name] = entry
    medians = {key: statistics.median(t[key] for t in totals) for key in totals[0]}
    result: dict[str, Any] = {
        "benchmark": args.what,
        "workload": meter.load.name,
        "settings": args.set,
        "machine": describe(),
        "ranks": world,
        "threads": torch.get_num_threads(),
        "warmup": args.warmup,
        "repeats": repeats,
        "step_seconds": whole,
        "step_quartiles": _quartiles(per_step),
        "step_cpu_seconds": sum(
            e["cpu_seconds"] * e["times_a_step"]
            for name, e in phases.items()
            if "cpu_seconds" in e and name != "save"
        ),
        "phases": phases,
        "tokens": medians,
        "tokens_per_second": {},
    }
    rates = result["tokens_per_second"]
    if "play" in mine:
        sampling = mine["play"] + mine.get("probe", 0.0)
        rates["generated"] = medians["generated"] / sampling
    learning = mine.get("follow", 0.0) + mine.get("lead", 0.0)
    if learning:
        rates["trained, with context"] = medians["real"] / learning
        result["padding_share"] = 1.0 - medians["real"] / medians["stored"]
    if args.what == "step":
        rates["end to end, sampled tokens"] = medians["generated"] / whole
        rates["end to end, a rank"] = medians["generated"] / whole / world
    if peak is not None:
        result |= {"peak": peak.as_dict(), "formula": flops.FORMULA}
        total = sum(sum(v) for v in meter.model_flops.values()) / repeats
        run = sum(sum(v) for v in meter.executed.values()) / repeats
        result["mfu"] = total / (whole * peak.flops * world)
        result["hfu"] = run / (whole * peak.flops * world)
    return result


def _quartiles(values: Sequence[float]) -> list[float]:
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def save_phase(meter: Meter, folder: Path) -> None:
    """A checkpoint of both roles, written and put in place."""
    for number in range(2):
        target = folder / f"saved{number}"
        if dist.get_rank() == 0:
            target.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        meter.phase("save", lambda t=target: checkpoint.save(t, 1, meter.load.learners, {}, 1))


def print_table(result: dict[str, Any]) -> None:
    """The result for people."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120)
    title = f"{result['benchmark']} {result['workload']}: {result['machine']}, "
    title += f"{result['ranks']} rank(s) of {result['threads']} thread(s)"
    table = Table(title=title, title_justify="left")
    head = ["phase", "ms", "quartiles", "CPU ms", "idle", "share", "MFU %", "HFU %", "peak MiB"]
    head.append("slowest / mean")
    for name in head:
        table.add_column(name, justify="left" if name == "phase" else "right")
    for name, e in result["phases"].items():
        low, high = e["quartiles"]
        share = e["seconds"] * e["times_a_step"] / result["step_seconds"]
        row = [name, f"{1e3 * e['seconds']:.2f}", f"{1e3 * low:.2f} - {1e3 * high:.2f}"]
        row.append(f"{1e3 * e['cpu_seconds']:.2f}" if "cpu_seconds" in e else "")
        row.append(f"{e['idle_share']:.1%}" if "idle_share" in e else "")
        row.append("" if name == "save" else f"{share:.1%}")
        row += [f"{100 * e[key]:.2f}" if key in e else "" for key in ("mfu", "hfu")]
        row.append(f"{e['peak_bytes'] / 2**20:,.0f}" if "peak_bytes" in e else "")
        row.append(f"{e['slowest_over_mean']:.3f} (rank {e['slowest_rank']})")
        table.add_row(*row)
    console.print(table)
    low, high = result["step_quartiles"]
    console.print(
        f"step {1e3 * result['step_seconds']:.1f} ms ({1e3 * low:.1f} - {1e3 * high:.1f}), "
        f"{result['repeats']} repeats after {result['warmup']}"
        + (f"; CPU time {1e3 * cpu:.1f} ms" if (cpu := result["step_cpu_seconds"]) else "")
    )
    for name, rate in result["tokens_per_second"].items():
        console.print(f"{name}: {rate:,.0f} tokens/s")
    tokens = result["tokens"]
    console.print(
        f"sampling: {tokens['spared']:,.0f} of {tokens['sampling']:,.0f} tokens of prompts and "
        "answers were not computed (shared beginnings, held from before)"
    )
    if "padding_share" in result:
        console.print(f"padding: {result['padding_share']:.2%} of the stored tokens")
    if "mfu" in result:
        console.print(
            f"MFU {result['mfu']:.2%}, HFU {result['hfu']:.2%} of {result['peak']['how']}"
        )
        console.print(result["formula"])
    if "energy_joules" in result:
        console.print(f"energy: {result['energy_joules']:,.1f} J a step")
    for name, share in result.get("profile", {}).items():
        console.print(f"profiled step, {name}: {share:.1%}")


def main(argv: Sequence[str]) -> int:
    """Run one benchmark; the exit code."""
    parser = Parser(prog="binac bench", description=__doc__)
    parser.add_argument("what", choices=tuple(PHASES))
    parser.add_argument("--workload", choices=tuple(WORKLOADS), default="quickstart")
    parser.add_argument("--warmup", type=whole(0), default=3, metavar="N")
    parser.add_argument("--repeats", type=whole(1), default=10, metavar="N")
    parser.add_argument("--nproc", type=whole(1), metavar="N", help="ranks on this machine")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--save", action="store_true", help="also time a checkpoint")
    parser.add_argument("--profile", action="store_true", help="share of the step by kind of work")
    parser.add_argument("--trace", type=Path, metavar="DIR", help="a Chrome trace for each rank")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    return under_ranks(
        args, argv, lambda config, folder: _measure(args, config, folder), print_table
    )


def _measure(args: argparse.Namespace, config: Any, folder: Path) -> dict[str, Any]:
    timeline = Timeline(dist.get_rank()) if args.trace is not None else None
    meter = Meter(build(args.workload, config, folder), timeline)
    totals: list[dict[str, int]] = []
    for step in range(args.warmup):
        one_step(meter, args.what, step, totals)
    meter.forget()
    totals.clear()
    before = energy_joules()
    for step in range(args.warmup, args.warmup + args.repeats):
        one_step(meter, args.what, step, totals)
    after = energy_joules()
    meter.keep(lambda name: name in PHASES[args.what])
    if args.save:
        save_phase(meter, folder)
    result = summarise(meter, totals, args)
    used: list[float | None] = [None] * dist.get_world_size()
    mine = None if before is None or after is None else (after - before) / args.repeats
    dist.all_gather_object(used, mine)
    told = [joules for joules in used if joules is not None and joules > 0.0]  # counters wrap
    if told:
        # A GPU's counter is a rank's own; that of the processors is the machine's.
        result["energy_joules"] = sum(told) if torch.cuda.is_available() else max(told)
    if args.profile:
        step = args.warmup + args.repeats
        result["profile"] = profiled_shares(lambda: one_step(meter, args.what, step, []))
    if timeline is not None:
        timeline.write(args.trace)
    return result

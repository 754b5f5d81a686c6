"""`binac bench packing`: speed, fill and balance of the planner against two baselines.

Every cell plans the same random lengths three ways: by the planner in use, by its Python twin, and
by first-fit decreasing in plain NumPy with bins dealt out in turn. Times are the least of several
runs; on a busy machine the CPU time, not the wall time, says what planning costs. Above
`--baseline-limit` sequences the two slow ones are measured in one cell of each size, and the others
say that they were not.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from types import ModuleType

import numpy as np

from megatron_binac import packing, packing_reference
from megatron_binac.arguments import Parser, whole
from megatron_binac.packing import Alignment, CostModel, Plan

COSTS = CostModel.from_shape(
    num_layers=24, hidden=2048, ffn=8192, heads=16, kv_heads=8, vocab=128_000
)
"""A model of some 1.5 billion parameters; the shape decides how much a long sequence weighs."""
LAWS = ("log-normal", "heavy-tail", "bimodal")


def draw_lengths(law: str, num: int, capacity: int, seed: int = 0) -> np.ndarray:
    """int64 [num]: log-normal, a Pareto tail cut at the capacity, or short and long turns."""
    rng = np.random.default_rng(seed)
    if law == "log-normal":
        lengths = rng.lognormal(6.5, 0.9, num)
    elif law == "heavy-tail":
        lengths = 256 * (1 + rng.pareto(1.1, num))
    else:
        short, long = rng.normal(500, 150, num), rng.normal(6000, 2000, num)
        lengths = np.where(rng.random(num) < 0.7, short, long)
    return np.clip(lengths, 1, capacity).astype(np.int64)


def first_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Bin of each sequence by first-fit decreasing, as one writes it in NumPy: O(n * bins)."""
    room = np.zeros(0, dtype=np.int64)
    used = 0
    bins = np.zeros(len(lengths), dtype=np.int64)
    for i in np.argsort(-lengths, kind="stable"):
        fits = room[:used] >= lengths[i]
        at = int(fits.argmax()) if used else 0
        if used == 0 or not fits[at]:
            if used == len(room):
                room = np.concatenate([room, np.full(max(64, used), capacity)])
            at = used
            used += 1
        room[at] -= lengths[i]
        bins[i] = at
    return bins


@cache
def measured_first_fit(law: str, num: int, capacity: int) -> tuple[np.ndarray, float]:
    """Bins and CPU seconds of `first_fit`; the number of ranks changes neither."""
    lengths = draw_lengths(law, num, capacity)
    started = time.process_time()
    bins = first_fit(lengths, capacity)
    return bins, time.process_time() - started


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One cell of the table."""

    law: str
    num_sequences: int
    capacity: int
    dp_size: int
    seconds: float
    cpu_seconds: float
    sequences_per_second: float
    """By CPU time."""
    num_bins: int
    lower_bound: int
    num_microbatches: int
    num_dummies: int
    fill: float
    """Real / stored tokens."""
    padding: float
    """Padding / stored tokens."""
    occupancy: float
    """Real tokens / (bins * capacity)."""
    rank_balance: float
    """Largest / mean cost over ranks."""
    microbatch_balance: float
    """Largest / mean cost over micro-batches."""
    microbatch_floor: float
    """The costliest single sequence / mean cost of a micro-batch: the balance can't be lower."""
    reference_cpu_seconds: float | None = None
    reference_speedup: float | None = None
    first_fit_cpu_seconds: float | None = None
    first_fit_speedup: float | None = None
    first_fit_bins: int | None = None
    first_fit_rank_balance: float | None = None


def measure(call: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Least wall and least CPU seconds of `repeats` calls."""
    wall, cpu = [], []
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            started, started_cpu = time.perf_counter(), time.process_time()
            call()
            wall.append(time.perf_counter() - started)
            cpu.append(time.process_time() - started_cpu)
    finally:
        gc.enable()
    return min(wall), min(cpu)


def plan_with(
    core: ModuleType, lengths: np.ndarray, capacity: int, dp_size: int, align: Alignment
) -> Plan:
    """A plan by a given twin."""
    before = packing._core
    packing._core = core
    try:
        return packing.plan(
            lengths, capacity=capacity, dp_size=dp_size, costs=COSTS, alignment=align
        )
    finally:
        packing._core = before


def bench_cell(
    law: str, num: int, capacity: int, dp_size: int, align: Alignment, *, with_baselines: bool
) -> Row:
    """Measure one cell, with or without the two baselines."""
    longest = max(capacity // align.total_multiple * align.total_multiple, 1)
    lengths = draw_lengths(law, num, longest)
    core = packing._core
    plan = plan_with(core, lengths, capacity, dp_size, align)
    repeats = 20 if num <= 1000 else 5 if num <= 100_000 else 3
    seconds, cpu = measure(lambda: plan_with(core, lengths, capacity, dp_size, align), repeats)
    stats = plan.stats
    cost = COSTS(lengths)
    baselines: dict[str, float | int] = {}
    if with_baselines:
        _, by_reference = measure(
            lambda: plan_with(packing_reference, lengths, capacity, dp_size, align),
            3 if num <= 1000 else 1,
        )
        bins, by_first_fit = measured_first_fit(law, num, longest)
        rank_cost = np.bincount(bins % dp_size, weights=cost, minlength=dp_size)
        baselines = {
            "reference_cpu_seconds": by_reference,
            "reference_speedup": by_reference / cpu,
            "first_fit_cpu_seconds": by_first_fit,
            "first_fit_speedup": by_first_fit / cpu,
            "first_fit_bins": int(bins.max()) + 1,
            "first_fit_rank_balance": float(rank_cost.max() / rank_cost.mean()),
        }
    return Row(
        law=law,
        num_sequences=num,
        capacity=capacity,
        dp_size=dp_size,
        seconds=seconds,
        cpu_seconds=cpu,
        sequences_per_second=num / cpu,
        num_bins=stats.num_bins,
        lower_bound=stats.lower_bound,
        num_microbatches=stats.num_microbatches,
        num_dummies=stats.num_dummies,
        fill=stats.fill,
        padding=stats.padding,
        occupancy=stats.occupancy,
        rank_balance=stats.rank_balance,
        microbatch_balance=stats.microbatch_balance,
        microbatch_floor=float(cost.max() / (cost.sum() / stats.num_microbatches)),
        **baselines,
    )


def bench_gather(num_tokens: int = 32768, mean_length: int = 600) -> dict[str, float]:
    """CPU time of one gather with prompts and two fields, and of the same by the reference."""
    rng = np.random.default_rng(0)
    num = num_tokens // mean_length
    own = rng.integers(mean_length // 4, mean_length, num)
    ids = [rng.integers(0, 1000, n).astype(np.int32) for n in own]
    prompts = [rng.integers(0, 1000, mean_length // 3).astype(np.int32) for _ in range(num)]
    old = [rng.standard_normal(n).astype(np.float32) for n in own]
    advantages = rng.standard_normal(num).astype(np.float32)
    take = np.arange(num, dtype=np.int32)

    def run(core: ModuleType) -> int:
        before = packing._core
        packing._core = core
        try:
            fields = {"old_logprobs": old, "advantages": advantages}
            return packing.gather(ids, take, prompts=prompts, fields=fields).num_tokens
        finally:
            packing._core = before

    tokens = run(packing._core)
    _, cpu = measure(lambda: run(packing._core), 50)
    _, by_reference = measure(lambda: run(packing_reference), 10)
    return {
        "tokens": tokens,
        "cpu_seconds": cpu,
        "tokens_per_second": tokens / cpu,
        "reference_speedup": by_reference / cpu,
    }


def growth(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Growth of CPU time: the exponent of n, and time over that of n log n (1 = equal)."""
    out: list[dict[str, object]] = []
    keys = sorted({(r.law, r.capacity, r.dp_size) for r in rows})
    for law, capacity, dp_size in keys:
        series = [r for r in rows if (r.law, r.capacity, r.dp_size) == (law, capacity, dp_size)]
        series.sort(key=lambda r: r.num_sequences)
        if len(series) < 2:
            continue
        a, b = series[-2], series[-1]
        ratio = b.cpu_seconds / a.cpu_seconds
        sizes = b.num_sequences / a.num_sequences
        logs = math.log(b.num_sequences) / math.log(a.num_sequences)
        out.append(
            {
                "law": law,
                "capacity": capacity,
                "dp_size": dp_size,
                "from": a.num_sequences,
                "to": b.num_sequences,
                "exponent": math.log(ratio) / math.log(sizes),
                "over_n_log_n": ratio / (sizes * logs),
            }
        )
    return out


def print_table(rows: Sequence[Row], gathered: dict[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"packing: {packing.backend()}", title_justify="left")
    for name in (
        "law", "sequences", "capacity", "DP", "ms", "CPU ms", "M seq/s", "bins / bound", "fill %",
        "padding %", "ranks", "micro-b.", "floor", "Python ms", "x Python", "NumPy ms", "x NumPy",
        "NumPy bins", "NumPy ranks",
    ):  # fmt: skip
        table.add_column(name, justify="left" if name == "law" else "right")
    for r in rows:
        table.add_row(
            r.law,
            f"{r.num_sequences:,}",
            f"{r.capacity:,}",
            str(r.dp_size),
            f"{1e3 * r.seconds:.1f}",
            f"{1e3 * r.cpu_seconds:.1f}",
            f"{r.sequences_per_second / 1e6:.2f}",
            f"{r.num_bins / r.lower_bound:.4f}",
            f"{100 * r.fill:.2f}",
            f"{100 * r.padding:.2f}",
            f"{r.rank_balance:.4f}",
            f"{r.microbatch_balance:.3f}",
            f"{r.microbatch_floor:.3f}",
            _measured(_times(r.reference_cpu_seconds, 1e3), ".0f"),
            _measured(r.reference_speedup, ".0f"),
            _measured(_times(r.first_fit_cpu_seconds, 1e3), ".0f"),
            _measured(r.first_fit_speedup, ".0f"),
            _measured(_times(r.first_fit_bins, 1 / r.lower_bound), ".4f"),
            _measured(r.first_fit_rank_balance, ".3f"),
        )
    console = Console(width=None if sys.stdout.isatty() else 220)
    console.print(table)
    console.print(
        "ms: wall time; all other times are CPU times. bins and NumPy bins: over the lower bound. "
        "ranks, micro-b., NumPy ranks: largest / mean cost; floor: what the costliest sequence "
        "alone makes of micro-b."
    )
    if any(r.reference_cpu_seconds is None for r in rows):
        console.print("n/m: not measured; --baseline-limit measures more of it, which takes long")
    for g in growth(rows):
        console.print(
            f"{g['law']}, capacity {g['capacity']}, DP {g['dp_size']}: CPU time from "
            f"{g['from']:,} to {g['to']:,} sequences grows as n^{g['exponent']:.2f}, "
            f"{g['over_n_log_n']:.2f} x n log n"
        )
    console.print(
        f"gather: {gathered['tokens']:,.0f} tokens in {1e6 * gathered['cpu_seconds']:.0f} us, "
        f"{gathered['reference_speedup']:.1f} x the reference"
    )


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _measured(value: float | None, form: str) -> str:
    return "n/m" if value is None else format(value, form)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; without arguments, the whole grid."""
    parser = Parser(prog="binac bench packing", description=__doc__)
    parser.add_argument(
        "--num-sequences",
        type=whole(1, 50_000_000),
        nargs="+",
        default=[1000, 100_000, 1_000_000],
        metavar="N",
    )
    parser.add_argument("--dp", type=whole(1, 2**20), nargs="+", default=[1, 8, 64], metavar="D")
    parser.add_argument(
        "--capacity", type=whole(1, packing.MAX_ROOM), nargs="+", default=[4096, 32768], metavar="C"
    )
    parser.add_argument("--law", nargs="+", choices=LAWS, default=list(LAWS))
    parser.add_argument(
        "--pack-multiple",
        type=whole(1, packing.MAX_ROOM),
        default=16,
        help="tokens, default 16 (FP8)",
    )
    parser.add_argument("--seq-multiple", type=whole(1, packing.MAX_ROOM), default=1)
    parser.add_argument(
        "--baseline-limit",
        type=whole(0),
        default=100_000,
        help="up to so many sequences the slow baselines plan every cell, above it one cell of "
        "each size (the first law, the largest capacity and DP); default 100000",
    )
    parser.add_argument("--json", action="store_true", help="one object instead of the table")
    args = parser.parse_args(argv)
    align = Alignment(seq_multiple=args.seq_multiple, pack_multiple=args.pack_multiple)
    shown = (args.law[0], max(args.capacity), max(args.dp))
    rows = [
        bench_cell(
            law,
            num,
            capacity,
            dp_size,
            align,
            with_baselines=num <= args.baseline_limit or (law, capacity, dp_size) == shown,
        )
        for num in args.num_sequences
        for capacity in args.capacity
        for law in args.law
        for dp_size in args.dp
    ]
    gathered = bench_gather()
    if args.json:
        report = {
            "benchmark": "packing",
            "backend": packing.backend(),
            "rows": [asdict(row) for row in rows],
            "growth": growth(rows),
            "gather": gathered,
        }
        print(json.dumps(report, indent=2))
    else:
        print_table(rows, gathered)
    return 0

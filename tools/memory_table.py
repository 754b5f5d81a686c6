#!/usr/bin/env python3
"""Memory that two colocated roles hold on one rank, phase by phase, with and without offload.

Measured on the CPU, where every tensor of a tiny pair is counted, beside what the planner says of
the same pair; and predicted for a pair of public shapes on GPUs.

    tools/memory_table.py --actor llama3:8b --critic llama3:8b --gpus 8 --tp 2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

PHASES = ("play", "follow", "lead")
Sizes = Mapping[str, Mapping[str, float]]
"""Bytes by role and part."""


def held(sizes: Sizes, phase: str, *, offload: bool) -> float:
    """Bytes on the device in a phase, all roles together."""
    whole = {role: sum(parts.values()) for role, parts in sizes.items()}
    if not offload:
        return sum(whole.values())
    if phase == "play":  # engines of both roles sample from the weights
        return sum(parts["weights"] for parts in sizes.values())
    return whole["actor" if phase == "follow" else "critic"]


def measured() -> tuple[Sizes, Sizes, Mapping[tuple[str, bool], float]]:
    """Parts of a tiny trained pair as counted and as planned, and what was on the device in each
    phase."""
    import numpy as np
    import torch

    from megatron_binac.config import LossConfig, ModelConfig, ParallelConfig, RoleConfig
    from megatron_binac.models.learner import MegatronLearner
    from megatron_binac.models.offload import Offload, account
    from megatron_binac.models.parallel import build_groups, start_distributed
    from megatron_binac.planner.memory import static_bytes
    from megatron_binac.planner.shapes import Shape
    from megatron_binac.types import TrainSequence

    start_distributed()
    rows = [
        TrainSequence(
            ids=np.arange(40, dtype=np.int32),
            mask=np.arange(40) >= 4,
            advantage=1.0,
            logprobs=np.full(40, np.nan, np.float32),
        )
    ]
    learners, planned = {}, {}
    for role, hidden in (("actor", 128), ("critic", 192)):
        model = ModelConfig(num_layers=4, hidden_size=hidden, ffn_hidden_size=2 * hidden)
        config = RoleConfig(model=model)
        made = MegatronLearner(
            role,
            config,
            build_groups(role, ParallelConfig(), 1),
            vocab_size=320,
            seed=1,
            num_steps=9,
            temperature=1.0,
        )
        made.hold_reference()
        made.update(rows, LossConfig())
        learners[role] = made
        plan = static_bytes(
            Shape.of(model, 320),
            ParallelConfig(),
            dp=1,
            stage=0,
            train=True,
            reference=True,
            precision="fp32",
            distributed=True,
        )
        planned[role] = parts_of(plan)
    counted = {role: account(made) for role, made in learners.items()}
    seen = {(phase, False): held(counted, phase, offload=False) for phase in PHASES}

    def on_device() -> float:
        """Counted by the memory behind the tensors, not by what was planned."""
        return sum(sum(offload.on_device(role).values()) for role in learners)

    offload = Offload(learners)
    seen["play", True] = on_device()
    for phase, role in (("follow", "actor"), ("lead", "critic")):
        with offload.training(role), torch.no_grad():
            seen[phase, True] = on_device()
    return counted, planned, seen


def parts_of(plan: object) -> dict[str, float]:
    return {p: getattr(plan, p) for p in ("weights", "gradients", "optimizer", "reference")}


def predicted(args: argparse.Namespace) -> Sizes:
    """Parts of a pair of public shapes on the fullest rank."""
    from megatron_binac.config import ParallelConfig
    from megatron_binac.planner.memory import static_bytes
    from megatron_binac.planner.shapes import named

    parallel = ParallelConfig(tp=args.tp, pp=args.pp, sequence_parallel=args.tp > 1)
    out = {}
    for role, name in (("actor", args.actor), ("critic", args.critic)):
        plans = [
            static_bytes(
                named(name),
                parallel,
                dp=args.gpus // (args.tp * args.pp),
                stage=stage,
                train=True,
                reference=not args.no_reference,
                precision="bf16",
                distributed=True,
            )
            for stage in range(args.pp)
        ]
        out[role] = parts_of(max(plans, key=lambda plan: plan.total))
    return out


def table(title: str, unit: float, name: str, sizes: Sizes, seen: Mapping | None = None) -> None:
    print(f"\n{title} ({name})")
    parts = ("weights", "gradients", "optimizer", "reference")
    print(f"| role | {' | '.join(parts)} | all |\n|---|{'---|' * 5}")
    for role, held_parts in sizes.items():
        cells = " | ".join(f"{held_parts[p] / unit:.2f}" for p in parts)
        print(f"| {role} | {cells} | {sum(held_parts.values()) / unit:.2f} |")
    print("\n| on the device | " + " | ".join(PHASES) + " |\n|---|---|---|---|")
    for offload in (False, True):
        found = [
            seen[p, offload] if seen else held(sizes, p, offload=offload) for p in PHASES
        ]
        cells = " | ".join(f"{x / unit:.2f}" for x in found)
        print(f"| {'offload_idle' if offload else 'all of it'} | {cells} |")


def main() -> int:
    from megatron_binac.arguments import whole

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--actor", default="llama3:8b")
    parser.add_argument("--critic", default="llama3:8b")
    parser.add_argument("--gpus", type=whole(1), default=8)
    parser.add_argument("--tp", type=whole(1), default=2)
    parser.add_argument("--pp", type=whole(1), default=1)
    parser.add_argument("--no-reference", action="store_true", help="without a KL to a reference")
    args = parser.parse_args()
    counted, planned, seen = measured()
    table("a tiny pair on this CPU, fp32, counted tensor by tensor", 2**20, "MiB", counted, seen)
    for role, parts in planned.items():
        worst = max(abs(counted[role][p] / value - 1) for p, value in parts.items())
        print(f"{role}: the planner is at most {worst:.2%} off")
    layout = f"{args.gpus} GPUs, TP {args.tp}, PP {args.pp}, bf16, optimizer sharded"
    table(f"{args.actor} and {args.critic}, {layout}", 2**30, "GiB a GPU", predicted(args))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

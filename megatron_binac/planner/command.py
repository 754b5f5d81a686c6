"""`binac plan`: does it fit, how fast, why this layout, and where more GPUs stop helping."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from megatron_binac.arguments import positive, whole
from megatron_binac.config import Config
from megatron_binac.planner import hardware, published, shapes
from megatron_binac.planner.layouts import Job, Planned, Search, names, search
from megatron_binac.planner.shapes import Shape
from megatron_binac.planner.speed import Shares

ADVICE = {
    "play": "sampling: its floor is the longest answer, one layer after the other. Sample more "
    "prompts a step, shorten max_*_tokens, or sample the next step while this one is learned",
    "probe": "the probe: raise bilevel.actor_steps_per_critic_step, or lam 0 without a probe",
    "fixed": "work outside the models: larger steps (rollout.prompts_per_step)",
    "refit": "moving weights: wider engines, or fewer refits a token",
    "compute": "learning is bound by FLOPs: more GPUs still help",
    "tensor": "tensor-parallel collectives: a smaller tp with recomputation or pipeline stages",
    "bubble": "the pipeline's bubble: fewer stages, smaller micro-batches, more prompts a step",
    "data": "gradient reduction and weight gathering: fewer data-parallel ranks (more prompts a "
    "step instead), or overlap them with the backward pass",
    "experts": "sending tokens to experts: expert ranks within a node",
}


SEARCHED = (".engine.tp", ".engine.kind", ".max_tokens_per_micro_batch", ".precision")
"""Ends of settings that a plan chooses itself."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `binac plan`."""
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="see `binac recipes`")
    text = "GPUs; several, separated by commas, show where scaling stops"
    parser.add_argument("--gpus", metavar="N[,N...]", help=text)
    gpus = ", ".join(hardware.all_gpus())
    parser.add_argument("--gpu", default="h100-80", metavar="NAME", help=f"one of {gpus}")
    text = "shape of both roles instead of the recipe's: llama3:8b, or a folder or config.json of "
    parser.add_argument("--model", metavar="MODEL", help=f"{text}Hugging Face's")
    parser.add_argument("--critic-model", metavar="MODEL", help="shape of the critic alone")
    text = "only layouts whose name has this text, as 'actor tp4 pp2' (repeatable)"
    parser.add_argument("--layout", action="append", default=[], metavar="TEXT", help=text)
    text = "mean length of a prompt (default 200, or what max_sequence_length leaves)"
    parser.add_argument("--prompt-tokens", type=whole(1), metavar="N", help=text)
    text = "mean answer over the longest allowed (default 0.6)"
    parser.add_argument("--mean-share", type=positive, default=0.6, metavar="X", help=text)
    parser.add_argument(
        "--steps", type=whole(1), metavar="N", help="default: the recipe's num_steps"
    )
    parser.add_argument("--price", type=positive, metavar="X", help="of a GPU hour")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    text = "the model against published steps, fitted and held out"
    parser.add_argument("--published", action="store_true", help=text)
    parser.add_argument("--json", action="store_true")


def check(args: argparse.Namespace) -> None:
    """ValueError for settings that a plan does not follow."""
    for text in args.set:
        key = text.partition("=")[0]
        if ".parallel." in key or key.endswith(SEARCHED):
            raise ValueError(
                f"--set {text}: binac plan looks for layouts, engines and micro-batches itself and "
                "counts in bf16; keep to some layouts with --layout, such as 'actor tp4 pp2 '"
            )


def run(
    args: argparse.Namespace,
    base: Config | None,
    shape_of: Callable[[str], Shape] = shapes.named,
) -> int:
    """Print a plan of the recipe `base`, a scaling table, or the check against published rows; the
    exit code. `shape_of` knows the models by name."""
    if args.published:
        return _print_published(args)
    if base is None or args.gpus is None:
        raise ValueError("got no recipe or no --gpus; expected binac plan RECIPE --gpus N")
    try:
        counts = sorted({int(text) for text in str(args.gpus).split(",")})
    except ValueError:
        raise ValueError(f"--gpus is {args.gpus!r}, expected 8 or 8,64,512") from None
    if min(counts) < 1:
        raise ValueError(f"--gpus is {args.gpus}, expected 1 or more")
    if not 0 < args.mean_share <= 1:
        raise ValueError(f"--mean-share is {args.mean_share}, expected in (0, 1]")
    jobs = [_job(args, base, count, shape_of) for count in counts]
    shares = published.fit(published.modelled())
    found = [(job, search(job, shares)) for job in jobs]
    if not any(result.tried for _, result in found):
        raise ValueError(
            f"no layout has {' and '.join(map(repr, args.layout))} in its name; names are as "
            f"{names(jobs[-1])[0]!r}"
        )
    if args.json:
        print(json.dumps([_as_dict(job, result, args, shares) for job, result in found], indent=2))
    elif len(found) == 1:
        print("\n".join(_text(*found[0], args)))
    else:
        print("\n".join(_scaling_text(found, args)))
    return 0 if any(result.best for _, result in found) else 1


def _job(
    args: argparse.Namespace, config: Config, gpus: int, shape_of: Callable[[str], Shape]
) -> Job:
    own: dict[str, Shape] = {"actor": Shape.of(config.actor.model, config.task.vocab_size)}
    if config.critic is not None:
        own["critic"] = Shape.of(config.critic.model, config.task.vocab_size)
    if args.model is not None:
        own = dict.fromkeys(own, shape_of(args.model))
    if args.critic_model is not None:
        own["critic"] = shape_of(args.critic_model)
    return Job(
        config=config,
        shapes=own,
        gpu=hardware.gpu(args.gpu),
        gpus=gpus,
        prompt_tokens=_prompt_tokens(args.prompt_tokens, config),
        mean_share=args.mean_share,
        precision="bf16",
        only=tuple(args.layout),
        price=args.price,
    )


def _prompt_tokens(asked: int | None, config: Config) -> int:
    """Mean length of a prompt; ValueError where none of its turns would fit the model."""
    rollout = config.rollout
    longest = rollout.max_attempt_tokens
    if rollout.criticised:
        longest += rollout.max_feedback_tokens + rollout.max_revision_tokens
    room = config.actor.model.max_sequence_length - longest
    if asked is None:
        return max(1, min(200, room))
    if asked > room:
        raise ValueError(
            f"--prompt-tokens is {asked}, and the answers leave {room} of max_sequence_length "
            f"{config.actor.model.max_sequence_length}; raise it with --set "
            "actor.model.max_sequence_length=N and the critic's"
        )
    return asked


def summary(job: Job, plan: Planned, steps: int) -> dict[str, float]:
    """Rates and cost of a plan."""
    phases = plan.phases
    learning = phases.seconds.get("follow", 0.0) + phases.seconds.get("lead", 0.0)
    hours = steps * plan.step * job.gpus / 3600
    found = {
        "step_seconds": plan.step,
        "sampled_tokens_per_second_per_gpu": phases.sampled_tokens / plan.step / job.gpus,
        "trained_tokens_per_second_per_gpu": phases.trained_tokens / plan.step / job.gpus,
        "mfu": phases.model_flops / (plan.step * job.gpus * job.gpu.flops),
        "bubble_share_of_learning": phases.causes.get("bubble", 0.0) / learning
        if learning
        else 0.0,
        "gpu_hours": hours,
        "memory_bytes": plan.memory,
    }
    return found | ({"cost": hours * job.price} if job.price is not None else {})


def _as_dict(job: Job, result: Search, args: argparse.Namespace, shares: Shares) -> dict[str, Any]:
    steps = args.steps or job.config.num_steps
    return {
        "recipe": job.config.recipe,
        "gpus": job.gpus,
        "gpu": dataclasses.asdict(job.gpu),
        "shares": dataclasses.asdict(shares),
        "parameters": {role: shape.num_parameters for role, shape in job.shapes.items()},
        "tried": result.tried,
        "best": [
            {
                "layout": plan.candidate.name,
                **summary(job, plan, steps),
                "bytes": plan.bytes_by_kind,
                "phases": plan.phases.seconds,
                "causes": plan.phases.causes,
            }
            for plan in result.best
        ],
        "lost": dict(result.reasons()),
        "why": [dataclasses.asdict(item) for item in _examples(result)],
    }


def _examples(result: Search, each: int = 4) -> list[Any]:
    """A few lost layouts of every kind, the first one for each different reason."""
    shown: list[Any] = []
    for kind in ("illegal", "memory", "slower"):
        reasons: set[str] = set()
        for item in result.lost:
            # What is over or behind by how much differs everywhere; what it is made of does not.
            words = (
                item.why.split(": ")[-1] if kind == "illegal" else item.why.rpartition(" of ")[2]
            )
            key = "".join(c for c in words if c.isalpha())
            if item.kind == kind and key not in reasons and len(reasons) < each:
                reasons.add(key)
                shown.append(item)
    return shown


def _text(job: Job, result: Search, args: argparse.Namespace) -> list[str]:
    steps = args.steps or job.config.num_steps
    models = ", ".join(
        f"{role} {shape.num_parameters / 1e9:.3g} B" for role, shape in job.shapes.items()
    )
    lines = [
        f"{job.config.recipe} on {job.gpus} x {job.gpu.name}: {models}, bf16",
        f"figures of the GPU: {job.gpu.source}",
        "predicted, not measured; shares of the peaks fitted to published steps "
        "(binac plan --published)",
        *_assumptions(job),
        "",
    ]
    if not result.best:
        return [*lines, f"none of {result.tried} layouts fits", *_why(result)]
    for number, plan in enumerate(result.best[:4]):
        rates = summary(job, plan, steps)
        place = "best" if number == 0 else "slower, and smaller without its KV cache"
        lines.append(f"{place}: {plan.candidate.name}")
        lines.append(
            f"  step {plan.step:,.1f} s, sampled {rates['sampled_tokens_per_second_per_gpu']:,.0f} "
            f"and trained {rates['trained_tokens_per_second_per_gpu']:,.0f} tokens/s/GPU, "
            f"MFU {rates['mfu']:.1%}, bubble {rates['bubble_share_of_learning']:.1%} of learning"
        )
        cost = f", {rates['cost']:,.4g} at {job.price} a GPU hour" if "cost" in rates else ""
        lines.append(f"  {steps:,} steps: {rates['gpu_hours']:,.3g} GPU hours{cost}")
        parts = [f"{k} {v:,.3g} s" for k, v in plan.phases.seconds.items() if v]
        lines.append(f"  phases: {', '.join(parts)}")
        if plan.phases.seconds["fixed"] > plan.step / 2:
            lines.append(
                "  most of it is the constant outside the models, fitted to large jobs: not to be "
                "believed for a small one"
            )
        kinds = [f"{k} {v / 2**30:,.1f}" for k, v in plan.bytes_by_kind.items() if v]
        lines.append(
            f"  GiB of {job.gpu.memory / 2**30:.0f} on the fullest GPU: {', '.join(kinds)}; "
            f"together {plan.memory / 2**30:,.1f}"
        )
    return [*lines, *_why(result)]


def _assumptions(job: Job) -> list[str]:
    """What the figures take for granted and a user may not."""
    lines = [
        f"taken: prompts of {job.prompt_tokens} tokens (--prompt-tokens), answers at "
        f"{job.mean_share:.0%} of their limit (--mean-share), sequence parallelism where tp > 1, "
        "engines that sleep while a role learns, attempts, feedback, revisions and probe alone "
        "(no value heads, look-ahead steps or further rounds)"
    ]
    if any(shape.num_experts for shape in job.shapes.values()):
        lines.append(
            "experts lie on the tensor-parallel ranks of a stage here (parallel.ep divides tp): no "
            "layout spreads them wider"
        )
    return lines


def _why(result: Search) -> list[str]:
    counts = result.reasons()
    lines = ["", f"{result.tried:,} layouts: " + ", ".join(f"{n:,} {k}" for k, n in counts.items())]
    return [*lines, *(f"  {x.kind}: {x.candidate}: {x.why}" for x in _examples(result))]


def bottleneck(plan: Planned) -> tuple[str, float]:
    """The cause with the most seconds of a step, and its share."""
    causes = dict(plan.phases.causes)
    for phase in ("play", "probe", "refit", "fixed"):
        causes[phase] = plan.phases.seconds.get(phase, 0.0)
    worst = max(causes, key=lambda k: causes[k])
    return worst, causes[worst] / plan.step


def stops_at(found: Sequence[tuple[Job, Search]]) -> int | None:
    """The last number of GPUs that still pays: twice the GPUs below 1.4 times the speed after it.

    None where every step up pays.
    """
    fitting = [(job.gpus, result.best[0].step) for job, result in found if result.best]
    for (gpus, step), (more, faster) in pairwise(fitting):
        if step / faster < 1.4 ** _doublings(gpus, more):
            return gpus
    return None


def _doublings(gpus: int, more: int) -> float:
    doublings = 0.0
    while gpus < more:
        gpus *= 2
        doublings += 1.0
    return doublings


def _scaling_text(found: Sequence[tuple[Job, Search]], args: argparse.Namespace) -> list[str]:
    first = next((job.gpus * r.best[0].step for job, r in found if r.best), None)
    head = f"{'GPUs':>6} {'step s':>9} {'efficiency':>10} {'sampled/s/GPU':>13} {'MFU':>6}  "
    lines = [f"{head}most of the step, layout"]
    for job, result in found:
        if not result.best:
            lines.append(f"{job.gpus:>6} {'-':>9} {'':>10} {'':>13} {'':>6}  no layout fits")
            continue
        plan = result.best[0]
        rates = summary(job, plan, args.steps or job.config.num_steps)
        assert first is not None
        worst, share = bottleneck(plan)
        lines.append(
            f"{job.gpus:>6} {plan.step:>9,.1f} {first / (job.gpus * plan.step):>10.0%} "
            f"{rates['sampled_tokens_per_second_per_gpu']:>13,.0f} {rates['mfu']:>6.1%}  "
            f"{worst} {share:.0%}, {plan.candidate.name}"
        )
    if sum(bool(result.best) for _, result in found) < 2:
        return lines
    stop = stops_at(found)
    if stop is None:
        return [*lines, "twice the GPUs is worth 1.4 times the speed or more all the way"]
    after = next(r for job, r in found if job.gpus > stop and r.best)
    worst, _ = bottleneck(after.best[0])
    return [*lines, f"stops paying after {stop} GPUs; what to change: {ADVICE[worst]}"]


def _print_published(args: argparse.Namespace) -> int:
    shares, rows = published.check()
    if args.json:
        found = {
            "shares": dataclasses.asdict(shares),
            "rows": [dataclasses.asdict(row) for row in rows],
            "sources": published.table()["sources"],
        }
        print(json.dumps(found, indent=2))
        return 0
    print(f"{'row':32} {'published s':>11} {'model s':>9} {'error':>7} {'held out':>9}")
    for row in rows:
        mark = "  length inferred from this row" if row.inferred else ""
        print(
            f"{row.name:32} {row.step:>11,.1f} {row.predicted:>9,.1f} {row.error:>+7.1%} "
            f"{row.held_out:>+9.1%}{mark}"
        )
    for row in published.table()["rows"]:
        if row["model"] is None:
            print(f"{row['name']:32} {row['step']:>11,.1f} {'-':>9}  not predicted: {row['why']}")
    judged = [row for row in rows if not row.inferred]
    total = len(published.table()["rows"]) - (len(rows) - len(judged))
    for name in ("error", "held_out"):
        near = sum(abs(getattr(row, name)) <= 0.25 for row in judged)
        print(f"{near} of {total} rows within 25 % ({'fitted' if name == 'error' else 'held out'})")
    print(f"shares: {dataclasses.asdict(shares)}")
    for name, source in published.table()["sources"].items():
        print(f"{name}: {source}")
    return 0

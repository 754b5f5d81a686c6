"""Items of an evaluation to its numbers: every round under every gate, pass@k, maj@k, intervals.

The unit is always the problem: samples of one problem are not independent, so an interval is over
problems. T rounds of feedback, so T + 1 answers; S samples of a problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_binac.algo.metrics import cluster_bootstrap, pass_at_k, wilson_interval
from megatron_binac.algo.votes import gates, majority_at_k
from megatron_binac.types import Grade, Prompt

if TYPE_CHECKING:
    from megatron_binac.rollout.rounds import Item

GATES = ("always", "learned", "oracle")
RESAMPLES = 2000
Estimate = dict[str, float]
"""value, low, high: a mean over problems with its 95 % interval."""


def standings(
    items: Sequence[Item],
    *,
    same_answer: Callable[[str, str], bool] | None,
    seed: int,
    summarise: Callable[[list[tuple[Prompt, Grade]]], Mapping[str, Any]] | None = None,
    prompts: Mapping[str, Prompt] | None = None,
) -> dict[str, Any]:
    """All numbers of an evaluation, JSON-able.

    `same_answer` says whether two parsed answers count as one in a vote; None where a task has no
    votes. `summarise` is the task's own (the bias for positions of multiple choice) and gets the
    first and the last answers. A chain with an answer that failed (engine or verifier) is left out
    and counted.
    """
    num_rounds = len(items[0]["answers"]) - 1
    whole = [i for i in items if not any(a["failed"] for a in i["answers"])]
    by_id: dict[str, list[Item]] = {}
    for item in whole:
        by_id.setdefault(item["id"], []).append(item)
    out: dict[str, Any] = {
        "num_problems": len({i["id"] for i in items}),
        "num_chains": len(items),
        "num_failed": len(items) - len(whole),
        "rounds": [_round(t, by_id, seed) for t in range(num_rounds + 1)],
    }
    out |= _per_k(by_id, num_rounds, same_answer, seed)
    if num_rounds:
        out["feedback"] = _feedback(whole)
    out["tokens"] = {
        "answers": sum(a["tokens"] for i in items for a in i["answers"]),
        "feedbacks": sum(z["tokens"] for i in items for z in i["feedbacks"]),
    }
    out["num_shortened_prompts"] = sum(i["shortened"] for i in items)
    cut = [a["finish"] == "length" for i in items for a in i["answers"]]
    out["cut_answers_share"] = sum(cut) / len(cut)
    if summarise is not None and prompts is not None:
        for name, t in (("first", 0), ("last", num_rounds)):
            pairs = [(prompts[i["id"]], _grade(i["answers"][t])) for i in whole]
            out[f"{name}_answers"] = dict(summarise(pairs))
    return out


def _grade(answer: Mapping[str, Any]) -> Grade:
    return Grade(score=answer["score"], parsed=answer["parsed"], reason=answer["reason"])


def _right(item: Item) -> list[bool]:
    return [a["score"] >= 1.0 for a in item["answers"]]


def _round(t: int, by_id: Mapping[str, list[Item]], seed: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {gate: [] for gate in GATES}
    flips = {"fixed": 0, "broken": 0, "was_wrong": 0, "was_right": 0}
    for chains in by_id.values():
        opened = [gates(_right(i), [z["verdict"] for z in i["feedbacks"]]) for i in chains]
        for gate in GATES:
            found[gate].append(sum(g[gate][t] for g in opened) / len(chains))
        for item in chains if t else []:
            before, after = _right(item)[t - 1 : t + 1]
            flips["was_right" if before else "was_wrong"] += 1
            flips["fixed"] += after and not before
            flips["broken"] += before and not after
    out: dict[str, Any] = {gate: _estimate(values, seed) for gate, values in found.items()}
    if t:
        out["fix"] = _share(flips["fixed"], flips["was_wrong"])
        out["break"] = _share(flips["broken"], flips["was_right"])
    return out


def _per_k(
    by_id: Mapping[str, list[Item]],
    num_rounds: int,
    same_answer: Callable[[str, str], bool] | None,
    seed: int,
) -> dict[str, Any]:
    """pass@k and maj@k of the first and of the last answers, for k = 1, 2, 4 ... samples."""
    num = min((len(chains) for chains in by_id.values()), default=0)
    ks = [2**e for e in range(20) if 2**e <= num]
    ks += [num] if num not in ks and num else []
    out: dict[str, Any] = {"pass_at_k": {}, "maj_at_k": {}}
    for name, t in (("first", 0), ("last", num_rounds)) if num_rounds else (("first", 0),):
        rows = []
        for chains in by_id.values():
            right = [_right(i)[t] for i in chains]
            kinds = None
            if same_answer is not None:
                kinds = answer_kinds(
                    [i["answers"][t]["parsed"] for i in chains], right, same_answer
                )
            rows.append((right, kinds))
        out["pass_at_k"][name] = {
            str(k): _estimate([pass_at_k(len(r), sum(r), k) for r, _ in rows], seed) for k in ks
        }
        if same_answer is not None:
            out["maj_at_k"][name] = {
                str(k): _estimate([majority_at_k(c or [], r, k, seed=seed) for r, c in rows], seed)
                for k in ks
            }
    return out


def answer_kinds(
    parsed_S: Sequence[str | None], right_S: Sequence[bool], same: Callable[[str, str], bool]
) -> list[int | None]:
    """A number for each different answer. Right ones are equal to the gold answer, so to each
    other; a wrong one is compared with those that came before it."""
    examples: list[tuple[str, bool]] = []
    out: list[int | None] = []
    for text, right in zip(parsed_S, right_S, strict=True):
        if text is None:
            out.append(None)
            continue
        place = next(
            (
                place
                for place, (other, other_right) in enumerate(examples)
                if right == other_right and (right or text == other or same(other, text))
            ),
            len(examples),
        )
        if place == len(examples):
            examples.append((text, right))
        out.append(place)
    return out


def _feedback(items: Sequence[Item]) -> dict[str, Any]:
    pairs = [(z, _right(i)[t]) for i in items for t, z in enumerate(i["feedbacks"])]
    said = [(z["verdict"], right) for z, right in pairs if z["verdict"] is not None]
    return {
        "verdict_share": _share(len(said), len(pairs)),
        "verdict_right": _share(sum(v == right for v, right in said), len(said)),
        "says_right_share": _share(sum(v for v, _ in said), len(said)),
        "leak": _share(sum(z["leak"] for z, _ in pairs), len(pairs)),
        "cut_share": _share(sum(z["finish"] == "length" for z, _ in pairs), len(pairs)),
    }


def _estimate(values: Sequence[float], seed: int) -> Estimate:
    """Mean over problems and its interval; of plain yes and no, Wilson's, as a bootstrap of equal
    values has no width."""
    if not values:
        return {"value": math.nan, "low": 0.0, "high": 1.0}
    if all(v in (0.0, 1.0) for v in values):
        found = wilson_interval(int(sum(values)), len(values))
    else:
        found = cluster_bootstrap(
            values, list(range(len(values))), seed=seed, num_resamples=RESAMPLES
        )
    return {"value": found.value, "low": found.low, "high": found.high}


def _share(part: int, whole: int) -> float:
    return part / whole if whole else math.nan


def table(result: Mapping[str, Any]) -> str:
    """The numbers as lines for a screen, percent with 95 % intervals over problems."""
    found: Mapping[str, Any] = result["standings"]
    setting = result["settings"]
    lines = [
        f"{setting['task']}: {found['num_problems']} problems, {setting['samples']} samples, "
        f"{found['num_failed']} chains failed",
        f"actor {result['actor']}" + (f", critic {result['critic']}" if result["critic"] else ""),
        "",
        f"{'after':10}{'accuracy':>22}{'learned gate':>22}{'oracle gate (bound)':>22}",
    ]
    for t, row in enumerate(found["rounds"]):
        cells = "".join(f"{_percent(row[gate]):>22}" for gate in GATES)
        lines.append(f"{'no round' if not t else f'round {t}':10}{cells}")
    for name, title in (("pass_at_k", "pass@k"), ("maj_at_k", "maj@k")):
        for which, by_k in found[name].items():
            if len(by_k) > 1:
                cells = "   ".join(f"{k}: {_percent(e)}" for k, e in by_k.items())
                lines.append(f"{title}, {which} answers   {cells}")
    if "feedback" in found:
        f = found["feedback"]
        right = f", right in {f['verdict_right']:.1%} of these" if f["verdict_share"] else ""
        lines.append(
            f"feedback: a verdict in {f['verdict_share']:.1%}{right}, leaks in {f['leak']:.1%}"
        )
    lines.append(
        f"tokens: {found['tokens']['answers']} of answers, {found['tokens']['feedbacks']} of "
        f"feedback; {found['cut_answers_share']:.1%} of answers cut by their limit, "
        f"{found['num_shortened_prompts']} prompts shortened"
    )
    for which in ("first", "last"):
        own = found.get(f"{which}_answers", {})
        lines += [f"{which} answers, {key}: {value}" for key, value in own.items()]
    return "\n".join(lines)


def _percent(e: Estimate) -> str:
    return f"{100 * e['value']:.1f} [{100 * e['low']:.1f}, {100 * e['high']:.1f}]"

"""Growing the tree of each prompt: attempts, feedbacks, revisions, graded at both ends; and the
probe.

Every rank calls these with the same prompts and ends with the same trees. Suffixes: P prompts, G
attempts, C criticised attempts, F feedbacks, M revisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron_binac.algo.bilevel import choose_attempts
from megatron_binac.algo.prompts import Template
from megatron_binac.config import RolloutConfig
from megatron_binac.first_rank import on_first
from megatron_binac.rollout.critics import TextCritic
from megatron_binac.rollout.engine import Engine
from megatron_binac.rollout.judging import Judging, shared_out
from megatron_binac.seeds import name_seed
from megatron_binac.tasks.base import Cursor, Task, for_critic
from megatron_binac.tokenizer import Tokenizer
from megatron_binac.types import Completion, Grade, Prompt, Sampling, Tree, Turn, TurnKind

Ended = Callable[[int, Completion], None]
"""Called with the number of a context and its answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Players:
    """Who speaks, who judges, and how turns become token ids."""

    actor: Engine
    critic: Engine | None
    task: Task
    template: Template
    tokenizer: Tokenizer
    seed: int
    text_critic: TextCritic | None = None
    """Speaks in the place of `critic`."""

    @property
    def has_critic(self) -> bool:
        return self.critic is not None or self.text_critic is not None

    def sampling(
        self,
        rollout: RolloutConfig,
        kind: TurnKind,
        *,
        greedy: bool = False,
        continued: bool = False,
    ) -> Sampling:
        limits = {
            "attempt": rollout.max_attempt_tokens,
            "feedback": rollout.max_feedback_tokens,
            "revision": rollout.max_revision_tokens,
        }
        return Sampling(
            max_tokens=limits[kind],
            stop_id=self.tokenizer.end_id,
            temperature=rollout.temperature,
            top_k=rollout.top_k,
            top_p=rollout.top_p,
            greedy=greedy,
            continued=continued,
        )

    def speak(
        self,
        engine: Engine,
        kind: TurnKind,
        contexts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
        ended: Ended | None = None,
    ) -> list[Turn]:
        """One turn per context, in order; `ended` is for engines that tell endings."""
        prompts = [np.asarray(ids, np.int32) for ids in contexts]
        told: dict[str, Any] = {} if ended is None else {"ended": ended}
        answers = engine.generate(prompts, seeds, sampling, **told)
        return [self._turn(kind, p, a) for p, a in zip(prompts, answers, strict=True)]

    def _turn(self, kind: TurnKind, prompt_ids: np.ndarray, answer: Completion) -> Turn:
        return Turn(
            kind=kind,
            prompt_ids=prompt_ids,
            ids=answer.ids,
            logprobs=answer.logprobs,
            finish=answer.finish,
            version=answer.version,
            text=self.tokenizer.decode(self.spoken(answer.ids)),
        )

    def feedback(
        self,
        prompts: Sequence[Prompt],
        attempts: Sequence[Turn],
        seeds: Sequence[int],
        sampling: Sampling,
    ) -> list[Turn]:
        """One feedback per (problem, attempt), by the critic policy or by the text critic."""
        shown = shown_to_critic(self.task, prompts, [y.text for y in attempts])
        contexts = [
            self.template.feedback_ids(p, self.spoken(y.ids))
            for p, y in zip(shown, attempts, strict=True)
        ]
        if self.text_critic is None:
            if self.critic is None:
                raise ValueError("got a request for feedback, expected a run with a critic")
            return self.speak(self.critic, "feedback", contexts, seeds, sampling)
        texts = _say_once(self.text_critic, shown, [y.text for y in attempts], seeds)
        out = []
        for context, text in zip(contexts, texts, strict=True):
            ids = [] if text is None else [*self.tokenizer.encode(text), self.tokenizer.end_id]
            cut = ids[: sampling.max_tokens]
            answer = Completion(
                ids=np.asarray(cut, np.int32),
                logprobs=np.full(len(cut), np.nan, np.float32),  # no policy of ours sampled it
                finish="failed" if text is None else "stop" if cut == ids else "length",
                version=0,
            )
            out.append(self._turn("feedback", np.asarray(context, np.int32), answer))
        return out

    def spoken(self, ids: np.ndarray) -> list[int]:
        """The ids of a turn without the end token."""
        out = ids.tolist()
        return out[:-1] if out and out[-1] == self.tokenizer.end_id else out

    def hand_in(self, judging: Judging, owners: Sequence[Prompt]) -> Ended | None:
        """What an engine that tells endings calls; None where it would help nothing."""
        if not judging.runs_apart:
            return None

        def ended(i: int, answer: Completion) -> None:
            if answer.finish != "failed":
                judging.hand_in(owners[i], self.tokenizer.decode(self.spoken(answer.ids)))

        return ended

    def answers(
        self,
        judging: Judging,
        kind: TurnKind,
        owners: Sequence[Prompt],
        contexts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        sampling: Sampling,
    ) -> list[Turn]:
        """The actor's turns on its contexts, whose grades may be on their way; `grade` sets
        them."""
        ended = self.hand_in(judging, owners)
        tells = ended is not None and getattr(self.actor, "tells_endings", False)
        turns = self.speak(self.actor, kind, contexts, seeds, sampling, ended if tells else None)
        if not tells:
            judging.share_out(_answered(owners, turns))
        return turns

    def forget(self) -> None:
        """Let the actor's engine drop what it holds of attempts: learning needs the memory."""
        getattr(self.actor, "forget", lambda: None)()

    def grade(self, judging: Judging, prompts: Sequence[Prompt], turns: Sequence[Turn]) -> None:
        """Set `turn.grade` of each turn."""
        grades = iter(judging.finish(_answered(prompts, turns)))
        for turn in turns:
            if turn.failed:
                turn.grade = Grade(
                    score=0.0, parsed=None, reason="the engine gave no answer", failed=True
                )
            else:
                turn.grade = next(grades)


def _answered(prompts: Sequence[Prompt], turns: Sequence[Turn]) -> list[tuple[Prompt, str]]:
    """What there is to judge: a turn that failed has no text, as an empty answer has."""
    return [(p, t.text) for p, t in zip(prompts, turns, strict=True) if not t.failed]


def shown_to_critic(
    task: Task, prompts: Sequence[Prompt], attempt_texts: Sequence[str]
) -> list[Prompt]:
    """`tasks.base.for_critic` of many attempts: each is looked at on one rank, and once."""
    pairs = list(zip(prompts, attempt_texts, strict=True))
    if getattr(task, "observe", None) is None:
        return list(prompts)
    distinct = list({(p.id, text): (p, text) for p, text in pairs}.values())
    seen = shared_out(lambda mine: [for_critic(task, p, text) for p, text in mine], distinct)
    found = {(p.id, text): shown for (p, text), shown in zip(distinct, seen, strict=True)}
    return [found[p.id, text] for p, text in pairs]


def _say_once(
    critic: TextCritic, prompts: Sequence[Prompt], attempts: Sequence[str], seeds: Sequence[int]
) -> list[str | None]:
    """Ask on the first rank and tell the others, so that all hear the same."""
    return on_first(lambda: critic.say(prompts, attempts, seeds))


def play(
    players: Players, prompts_P: Sequence[Prompt], rollout: RolloutConfig, step: int
) -> list[Tree]:
    """Grow one tree per prompt: G attempts, F feedbacks on C of them, M revisions of each.

    With `rollout.rounds` above 1 the trees of further rounds come after them.
    """
    seed = seeds_of(players.seed, step)
    trees = attempt(players, prompts_P, rollout, seed)
    if not rollout.criticised:
        return trees
    criticise(players, trees, rollout, seed)
    revise(players, trees, rollout, seed)
    grown, newest = trees, trees
    for number in range(1, rollout.rounds):
        newest = [t for tree in newest if (t := next_round(tree, number)) is not None]
        criticise(players, newest, rollout, seed)
        revise(players, newest, rollout, seed)
        grown = grown + newest
    players.forget()
    return grown


def attempt(
    players: Players, prompts_P: Sequence[Prompt], rollout: RolloutConfig, seed: Seed
) -> list[Tree]:
    """A tree per prompt with its G graded attempts."""
    contexts = [players.template.attempt_ids(p) for p in prompts_P]
    owners = [p for p in prompts_P for _ in range(rollout.attempts)]
    with Judging(players.task) as judging:
        attempts = players.answers(
            judging,
            "attempt",
            owners,
            [c for c in contexts for _ in range(rollout.attempts)],
            [seed(p, "attempt", g) for p in prompts_P for g in range(rollout.attempts)],
            players.sampling(rollout, "attempt", continued=rollout.criticised > 0),
        )
        players.grade(judging, owners, attempts)
    return [
        Tree(prompt=p, attempts=attempts[i * rollout.attempts : (i + 1) * rollout.attempts])
        for i, p in enumerate(prompts_P)
    ]


def next_round(tree: Tree, number: int) -> Tree | None:
    """The tree whose attempts are this one's revisions, where there are some and none is right."""
    revisions = tree.turns("revision")
    if not revisions or any(y.reward >= 1.0 for y in revisions if not y.failed):
        return None
    return Tree(prompt=tree.prompt, attempts=revisions, round=number)


def play_telling(
    players: Players, cursor: Cursor, rollout: RolloutConfig, step: int
) -> tuple[list[Tree], list[Tree]]:
    """`play`, with prompts whose attempts all got the same reward put back for new ones.

    Draws at most `rollout.resample` times more; what is kept then is topped up with the last
    trees without signal, so that the batch has its size. Returns the trees, and those that were
    dropped. Source: DAPO, arXiv 2503.14476, dynamic sampling.
    """
    seed = seeds_of(players.seed, step)
    kept: list[Tree] = []
    flat: list[Tree] = []
    for _ in range(1 + rollout.resample):
        grown = attempt(players, cursor.take(rollout.prompts_per_step - len(kept)), rollout, seed)
        flat += [tree for tree in grown if not tells(tree)]
        kept += [tree for tree in grown if tells(tree)]
        if len(kept) == rollout.prompts_per_step:
            break
    missing = rollout.prompts_per_step - len(kept)
    dropped = flat[: len(flat) - missing]
    players.forget()
    return kept + flat[len(flat) - missing :], dropped


def tells(tree: Tree) -> bool:
    """Whether the attempts differ in reward, so that the group has a gradient."""
    return len({y.reward for y in tree.attempts if not y.failed}) > 1


Seed = Callable[..., int]


def seeds_of(run_seed: int, step: int) -> Seed:
    """Seed of a sample from its place in its tree."""
    return lambda prompt, *place: name_seed(run_seed, step, prompt.id, *place)


def criticise(players: Players, trees: Sequence[Tree], rollout: RolloutConfig, seed: Seed) -> None:
    """Choose attempts of each tree and sample F feedbacks on each."""
    prompts: list[Prompt] = []
    attempts: list[Turn] = []
    seeds: list[int] = []
    for tree in trees:
        again = _again(tree)
        tree.criticised, tree.weights = choose_attempts(
            [t.reward for t in tree.attempts],
            rollout.criticised,
            rollout.select,
            np.random.default_rng(seed(tree.prompt, "choose", *again)),
            valid_G=[not t.failed for t in tree.attempts],
        )
        for g in tree.criticised:
            prompts += [tree.prompt] * rollout.feedbacks
            attempts += [tree.attempts[g]] * rollout.feedbacks
            seeds += [seed(tree.prompt, "feedback", g, f, *again) for f in range(rollout.feedbacks)]
    turns = iter(
        players.feedback(prompts, attempts, seeds, players.sampling(rollout, "feedback"))
        if prompts
        else []
    )
    for tree in trees:
        tree.feedbacks = [[next(turns) for _ in range(rollout.feedbacks)] for _ in tree.criticised]


def _again(tree: Tree) -> tuple[int, ...]:
    """What sets the seeds of a further round apart."""
    return (tree.round,) if tree.round else ()


def revise(
    players: Players,
    trees: Sequence[Tree],
    rollout: RolloutConfig,
    seed: Seed,
    *,
    probe: bool = False,
) -> None:
    """Sample M answers to every feedback and grade them: the revisions, or the probes of the
    adapted actor. Feedback that failed is not answered: its revisions have failed too."""
    contexts: list[Sequence[int]] = []
    seeds: list[int] = []
    owners: list[Prompt] = []
    for tree in trees:
        for c, g in enumerate(tree.criticised):
            for f, feedback in enumerate(tree.feedbacks[c]):
                if feedback.failed:
                    continue
                context = players.template.revision_ids(
                    tree.prompt, players.spoken(tree.attempts[g].ids), players.spoken(feedback.ids)
                )
                contexts += [context] * rollout.revisions
                # The probe draws with the revisions' own seeds: an actor that did not move says
                # the same.
                seeds += [
                    seed(tree.prompt, "revision", g, f, m, *_again(tree))
                    for m in range(rollout.revisions)
                ]
                owners += [tree.prompt] * rollout.revisions
    sampled = []
    if contexts:
        with Judging(players.task) as judging:
            sampling = players.sampling(rollout, "revision")
            sampled = players.answers(judging, "revision", owners, contexts, seeds, sampling)
            players.grade(judging, owners, sampled)
    turns = iter(sampled)
    for tree in trees:
        grown = [
            [
                [
                    unanswered(feedback) if feedback.failed else next(turns)
                    for _ in range(rollout.revisions)
                ]
                for feedback in feedbacks_F
            ]
            for feedbacks_F in tree.feedbacks
        ]
        if probe:
            tree.probes = grown
        else:
            tree.revisions = grown


def unanswered(feedback: Turn) -> Turn:
    """The revision that was not asked for, since there was no feedback."""
    none = np.zeros(0, np.int32)
    return Turn(
        kind="revision",
        prompt_ids=feedback.prompt_ids,
        ids=none,
        logprobs=none.astype(np.float32),
        finish="failed",
        version=feedback.version,
        text="",
        grade=Grade(score=0.0, parsed=None, reason="the critic gave no feedback", failed=True),
    )


def replay(
    players: Players, trees: Sequence[Tree], rollout: RolloutConfig, step: int
) -> list[Tree]:
    """The probe: the actor as it now stands answers the same (x, y0, z) of `step` again, which
    gives V*."""
    revise(players, trees, rollout, seeds_of(players.seed, step), probe=True)
    return list(trees)


def generated_tokens(trees: Sequence[Tree], *, probes: bool = False) -> int:
    """Tokens sampled for these trees (or for their probes), over all ranks.

    A text critic's words count as well: they have to be generated somewhere.
    """
    if probes:
        return sum(len(t.ids) for tree in trees for ys in tree.probes for y in ys for t in y)
    return sum(len(t.ids) for tree in trees for kind in kinds_of(tree) for t in tree.turns(kind))


def kinds_of(tree: Tree) -> tuple[TurnKind, ...]:
    """Kinds of turns that were sampled for this tree: a further round's attempts were not."""
    return ("feedback", "revision") if tree.round else ("attempt", "feedback", "revision")

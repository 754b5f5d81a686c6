"""Generation inside Megatron: what is sampled, from what, and that nothing depends on the batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_binac.config import ModelConfig, ParallelConfig, RoleConfig
from megatron_binac.models.learner import MegatronLearner
from megatron_binac.models.parallel import build_groups, start_distributed
from megatron_binac.rollout.megatron_engine import MegatronEngine, pick
from megatron_binac.seeds import uniforms
from megatron_binac.types import Completion, Sampling, TrainSequence

VOCAB = 50
STOP = 7
PLAIN = Sampling(max_tokens=12, stop_id=STOP, temperature=0.7)


@pytest.fixture(scope="module")
def learner() -> MegatronLearner:
    start_distributed()
    role = RoleConfig(
        model=ModelConfig(
            num_layers=2,
            hidden_size=32,
            ffn_hidden_size=48,
            max_sequence_length=32,
            init_std=0.2,  # large weights: answers differ, and so would log-probs
        ),
        train=False,
    )
    groups = build_groups("actor", ParallelConfig(), seed=1)
    return MegatronLearner(
        "actor", role, groups, vocab_size=VOCAB, seed=1, num_steps=1, temperature=PLAIN.temperature
    )


@pytest.fixture
def engine(learner: MegatronLearner) -> MegatronEngine:
    return MegatronEngine(learner, max_sequences=1000)


def prompts(num: int) -> list[np.ndarray]:
    """Prompts of 1 to 15 ids, every third one twice in a row."""
    rng = np.random.default_rng(0)
    out: list[np.ndarray] = []
    while len(out) < num:
        ids = rng.integers(0, VOCAB, int(rng.integers(1, 16))).astype(np.int32)
        out += [ids] * (2 if len(out) % 3 == 0 else 1)
    return out[:num]


def next_logprobs(learner: MegatronLearner, ids: np.ndarray) -> np.ndarray:
    """Log-prob [VOCAB] of each id that could come after `ids`, by the packed forward."""
    last = np.arange(len(ids) + 1) == len(ids)
    rows = [np.asarray([*ids, v], np.int32) for v in range(VOCAB)]
    return np.asarray(
        [x[-1] for x in learner.logprobs([TrainSequence(ids=r, mask=last) for r in rows])]
    )


def same(a: Completion, b: Completion) -> None:
    assert a.ids.tolist() == b.ids.tolist()
    assert a.finish == b.finish
    np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-5)


def test_a_sample_does_not_depend_on_its_batch(learner: MegatronLearner) -> None:
    asked, seeds = prompts(41), list(range(100, 141))
    engine = MegatronEngine(learner, max_sequences=1000)
    together = engine.generate(asked, seeds, PLAIN)
    # Some stop at once, some late, some never: rows leave the batch at every moment.
    assert len({len(c.ids) for c in together}) >= 8
    order = np.random.default_rng(1).permutation(41)
    shuffled = engine.generate([asked[i] for i in order], [seeds[i] for i in order], PLAIN)
    for at, got in zip(order, shuffled, strict=True):
        same(got, together[at])
    for max_sequences in (1, 7):
        few = MegatronEngine(learner, max_sequences=max_sequences)
        for got, want in zip(few.generate(asked, seeds, PLAIN), together, strict=True):
            same(got, want)


def test_an_answer_ends_with_its_first_stop_token_or_at_the_limit(engine: MegatronEngine) -> None:
    answers = engine.generate(prompts(60), list(range(60)), PLAIN)
    for c in answers:
        assert STOP not in c.ids[:-1]
        assert len(c.logprobs) == len(c.ids)
        if c.finish == "stop":
            assert c.ids[-1] == STOP
        else:
            assert c.finish == "length"
            assert len(c.ids) == PLAIN.max_tokens
            assert c.ids[-1] != STOP
    assert {c.finish for c in answers} == {"stop", "length"}


def test_a_stop_in_the_last_place_is_a_stop(engine: MegatronEngine) -> None:
    asked, seeds = prompts(60), list(range(60))
    (at, length) = next(
        (i, len(c.ids))
        for i, c in enumerate(engine.generate(asked, seeds, PLAIN))
        if c.finish == "stop" and len(c.ids) > 2
    )
    cut = engine.generate([asked[at]], [seeds[at]], replace(PLAIN, max_tokens=length))
    assert cut[0].finish == "stop"
    shorter = engine.generate([asked[at]], [seeds[at]], replace(PLAIN, max_tokens=length - 1))
    assert shorter[0].finish == "length"
    assert shorter[0].ids.tolist() == cut[0].ids[:-1].tolist()


def test_greedy_is_the_likeliest_id_of_the_full_forward(
    learner: MegatronLearner, engine: MegatronEngine
) -> None:
    """The cache gives what the packed forward gives over the whole text, at every position."""
    asked = prompts(4)
    answers = engine.generate(asked, [0] * 4, replace(PLAIN, greedy=True))
    for prompt, answer in zip(asked, answers, strict=True):
        for t, (token, logprob) in enumerate(zip(answer.ids, answer.logprobs, strict=True)):
            row_V = next_logprobs(learner, np.concatenate([prompt, answer.ids[:t]]))
            assert token == row_V.argmax()
            assert logprob == pytest.approx(row_V[token], abs=1e-5)


def test_sampled_logprobs_are_the_learners(
    learner: MegatronLearner, engine: MegatronEngine
) -> None:
    """Raw log-probs of the full distribution at the temperature, whatever top-k and top-p allow."""
    asked = prompts(30)
    for sampling in (PLAIN, replace(PLAIN, top_k=3), replace(PLAIN, top_p=0.6)):
        answers = engine.generate(asked, list(range(30)), sampling)
        rows = [
            TrainSequence(
                ids=np.concatenate([p, c.ids]), mask=np.arange(len(p) + len(c.ids)) >= len(p)
            )
            for p, c in zip(asked, answers, strict=True)
        ]
        for row, scored, c in zip(rows, learner.logprobs(rows), answers, strict=True):
            np.testing.assert_allclose(scored[row.mask], c.logprobs, rtol=0, atol=1e-4)


def test_samples_follow_the_distribution(learner: MegatronLearner, engine: MegatronEngine) -> None:
    prompt, num = prompts(1)[0], 4000
    one = replace(PLAIN, max_tokens=1)
    answers = engine.generate([prompt] * num, list(range(num)), one)
    share_V = np.bincount([int(c.ids[0]) for c in answers], minlength=VOCAB) / num
    p_V = np.exp(next_logprobs(learner, prompt))
    assert p_V.sum() == pytest.approx(1.0, abs=1e-5)
    assert np.all(np.abs(share_V - p_V) < 4.5 * np.sqrt(p_V / num) + 1e-3)


def test_top_k_and_top_p_keep_the_likeliest(
    learner: MegatronLearner, engine: MegatronEngine
) -> None:
    prompt = prompts(1)[0]
    p_V = np.exp(next_logprobs(learner, prompt))
    order = np.argsort(-p_V)
    before = np.cumsum(p_V[order]) - p_V[order]
    one = replace(PLAIN, max_tokens=1)
    for sampling, allowed in (
        (replace(one, top_k=1), order[:1]),
        (replace(one, top_k=4), order[:4]),
        (replace(one, top_p=0.5), order[before < 0.5]),
        (replace(one, top_k=3, top_p=0.99), order[:3]),
    ):
        answers = engine.generate([prompt] * 600, list(range(600)), sampling)
        assert {int(c.ids[0]) for c in answers} == set(allowed.tolist())


def test_seeds_decide(engine: MegatronEngine) -> None:
    prompt = prompts(1)[0]
    first, again, other = engine.generate([prompt] * 3, [5, 5, 6], PLAIN)
    same(first, again)
    assert first.ids.tolist() != other.ids.tolist()
    big = 2**63 - 1
    same(*engine.generate([prompt] * 2, [big, big], PLAIN))


def test_padding_of_the_vocabulary_is_never_sampled(learner: MegatronLearner) -> None:
    """Columns behind the vocabulary that would win every draw take no part, and add nothing
    (case 11)."""
    engine = MegatronEngine(learner, max_sequences=1000)
    asked = prompts(20)
    before = engine.generate(asked, list(range(20)), PLAIN)
    scored = learner.logprobs([TrainSequence(ids=p, mask=np.arange(len(p)) > 0) for p in asked])
    head = learner.chunks[-1].head_weight()
    assert len(head) > VOCAB
    kept = head.detach().clone()
    try:
        with torch.no_grad():
            head[VOCAB:] = 1e4 * head[:1].sign()
        after = engine.generate(asked, list(range(20)), PLAIN)
        rescored = learner.logprobs(
            [TrainSequence(ids=p, mask=np.arange(len(p)) > 0) for p in asked]
        )
    finally:
        with torch.no_grad():
            head.copy_(kept)
    for a, b in zip(before, after, strict=True):
        same(a, b)
    for a, b in zip(scored, rescored, strict=True):
        np.testing.assert_array_equal(a, b)


def test_pick_takes_the_lowest_of_equals_and_never_what_is_excluded() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0]]).expand(3, 4)
    greedy, logprob = pick(logits, np.zeros(3), replace(PLAIN, temperature=1.0, greedy=True))
    assert greedy.tolist() == [1, 1, 1]
    expected = 2.0 - np.log(np.exp([0.0, 2.0, 2.0, -1.0]).sum())
    np.testing.assert_allclose(logprob, expected, atol=1e-6)
    # The ends of the unit interval, where rounding could step over an edge.
    ends = np.array([0.0, 0.5, 1.0 - 2.0**-53])
    token, logprob = pick(logits, ends, replace(PLAIN, temperature=1.0, top_k=2))
    assert token.tolist() == [1, 2, 2]
    np.testing.assert_allclose(logprob, expected, atol=1e-6)  # not renormalised over the two
    blocked = torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf]]).expand(3, 4)
    assert pick(blocked, ends, PLAIN)[0].tolist() == [0, 1, 1]


def test_pick_at_the_temperature() -> None:
    """Logits [2, 1, 0] at 0.5 score as [4, 2, 0]; dividing log-probs instead gives -0.815 first."""
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    scores = [
        float(pick(logits, np.array([u]), replace(PLAIN, temperature=0.5))[1])
        for u in (0.1, 0.9, 0.99)
    ]
    np.testing.assert_allclose(scores, [-0.142932, -2.142932, -4.142932], atol=1e-6)


def test_uniforms_belong_to_the_seed_and_the_counter_alone() -> None:
    seeds = np.arange(1000, dtype=np.uint64)
    drawn = uniforms(seeds, 3)
    np.testing.assert_array_equal(drawn[[7]], uniforms(seeds[[7]], 3))
    assert (drawn != uniforms(seeds, 4)).all()
    assert drawn.min() >= 0.0
    assert drawn.max() < 1.0
    assert abs(drawn.mean() - 0.5) < 0.03


def test_publish_sets_the_version_and_weights_are_never_stale(learner: MegatronLearner) -> None:
    engine = MegatronEngine(learner, max_sequences=1000)
    asked = prompts(8)
    before = engine.generate(asked, list(range(8)), PLAIN)
    assert {c.version for c in before} == {0}
    engine.publish(3)
    kept = learner.snapshot()
    try:
        with torch.no_grad():
            for p in learner.parameters():
                p.mul_(0.5)
        after = engine.generate(asked, list(range(8)), PLAIN)
    finally:
        with torch.no_grad():
            for p, old in zip(learner.parameters(), kept, strict=True):
                p.copy_(old)
    assert {c.version for c in after} == {3}
    assert [c.ids.tolist() for c in after] != [c.ids.tolist() for c in before]
    again = engine.generate(asked, list(range(8)), PLAIN)
    assert [c.ids.tolist() for c in again] == [c.ids.tolist() for c in before]


def test_answers_are_told_as_they_end(engine: MegatronEngine) -> None:
    asked = prompts(40)
    told: list[tuple[int, Completion]] = []
    answers = engine.generate(asked, list(range(40)), PLAIN, lambda i, a: told.append((i, a)))
    lengths = [len(answer.ids) for _, answer in told]
    assert lengths == sorted(lengths) and len(set(lengths)) > 5
    assert sorted(i for i, _ in told) == list(range(40))
    for i, answer in told:
        same(answer, answers[i])


CONTINUED = replace(PLAIN, continued=True)


def continuations(asked: list[np.ndarray], answers: list[Completion]) -> list[np.ndarray]:
    """Prompts that begin with prompt and answer, two behind each; a stop token is left out."""
    rng = np.random.default_rng(5)
    out = []
    for prompt, answer in zip(asked, answers, strict=True):
        said = answer.ids[answer.ids != STOP]
        out += [
            np.concatenate([prompt, said, rng.integers(0, VOCAB, n).astype(np.int32)])
            for n in (2, 3)
        ]
    return [row for row in out if len(row) <= 20]


def test_what_is_continued_is_not_read_again(learner: MegatronLearner) -> None:
    asked = prompts(40)
    seeds = list(range(40))
    engine = MegatronEngine(learner, max_sequences=1000)
    answers = engine.generate(asked, seeds, CONTINUED)
    for got, want in zip(
        answers,
        MegatronEngine(learner, max_sequences=1000).generate(asked, seeds, PLAIN),
        strict=True,
    ):
        same(got, want)
    later = continuations(asked, answers)
    again = list(range(100, 100 + len(later)))
    fresh = MegatronEngine(learner, max_sequences=1000)
    expected = fresh.generate(later, again, PLAIN)
    engine.take_spared()
    for _ in range(2):  # what is held is there for every later call
        for got, want in zip(engine.generate(later, again, PLAIN), expected, strict=True):
            same(got, want)
    # By hand: every distinct token is read once, and none that the answers' rows hold.
    held = {
        tuple(row[:n])
        for p, c in zip(asked, answers, strict=True)
        for row in [[*p.tolist(), *c.ids.tolist()[:-1]]]
        for n in range(1, len(row) + 1)
    }
    wanted = {tuple(row[:n].tolist()) for row in later for n in range(1, len(row) + 1)}
    last = {tuple(row.tolist()) for row in later}
    whole = sum(len(row) for row in last)
    assert fresh.take_spared().tokens == whole - len(wanted)
    assert engine.take_spared().tokens == 2 * (whole - len(wanted - held | last))
    assert len(wanted - held | last) < 0.6 * len(wanted)


def test_what_is_held_goes_with_the_weights(learner: MegatronLearner) -> None:
    asked = prompts(12)
    later = [np.concatenate([p, np.asarray([3, 4], np.int32)]) for p in asked]
    seeds = list(range(12))

    def spared(engine: MegatronEngine) -> int:
        engine.take_spared()
        engine.generate(later, seeds, PLAIN)
        return engine.take_spared().tokens

    engine = MegatronEngine(learner, max_sequences=1000)
    none = spared(engine)
    engine.generate(asked, seeds, CONTINUED)
    assert spared(engine) > none
    engine.publish(1)
    assert spared(engine) == none
    engine.generate(asked, seeds, CONTINUED)
    engine.forget()
    assert spared(engine) == none
    engine.generate(asked, seeds, CONTINUED)
    kept = learner.snapshot()
    try:
        with torch.no_grad():
            learner.parameters()[0].mul_(0.5)
        assert spared(engine) == none
        got = engine.generate(later, seeds, PLAIN)
        want = MegatronEngine(learner, max_sequences=1000).generate(later, seeds, PLAIN)
        for a, b in zip(got, want, strict=True):
            same(a, b)
    finally:
        with torch.no_grad():
            for p, old in zip(learner.parameters(), kept, strict=True):
                p.copy_(old)


def test_no_more_sequences_are_held_than_are_decoded_together(learner: MegatronLearner) -> None:
    asked = prompts(20)
    seeds = list(range(20))
    engine = MegatronEngine(learner, max_sequences=8)
    answers = engine.generate(asked, seeds, CONTINUED)
    assert engine._held is not None and len(engine._held) == 8
    later = continuations(asked, answers)
    again = list(range(len(later)))
    want = MegatronEngine(learner, max_sequences=1000).generate(later, again, PLAIN)
    for a, b in zip(engine.generate(later, again, PLAIN), want, strict=True):
        same(a, b)


def test_wrong_use_says_what_to_change(engine: MegatronEngine) -> None:
    with pytest.raises(ValueError, match="got 2 seeds for 1 prompts"):
        engine.generate(prompts(1), [1, 2], PLAIN)
    long = np.zeros(21, np.int32)
    with pytest.raises(ValueError, match="21 tokens and 12 new ones do not fit"):
        engine.generate([long], [0], PLAIN)
    assert engine.generate([], [], PLAIN) == []

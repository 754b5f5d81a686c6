"""The bilevel gradient estimators in a game that is small enough to enumerate.

Shapes: X prompts, Y attempts, Z feedbacks, A answers to feedback, D draws of a tree, F feedbacks of
a tree, M revisions of a feedback.

The critic sees the prompt and the attempt, table ph [X, Y, Z]. The actor does not see the prompt:
it has one attempt table th0 [Y] and one revision table th1 [Y, Z, A], and learns about the prompt
from the feedback alone. So its best response depends on the critic, as it must for the bilevel
program to be one. Expectations enumerate every outcome unless a test says that it samples; the
truth is the central finite difference of the objective, which knows nothing of score functions,
baselines or trees.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megatron_binac.algo.advantages import running_baseline
from megatron_binac.algo.bilevel import (
    attempt_credit,
    feedback_value,
    leader_credit,
    leader_utility,
    revision_credit,
)

X, Y, Z, A = 3, 2, 3, 3
LAMS = [0.0, 0.1, 0.7]
TAU = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Actor:
    attempt_Y: Tensor
    revision_YZA: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Game:
    reward_XA: Tensor
    reward0_XY: Tensor
    th0_Y: Tensor
    th1_YZA: Tensor
    ph_XYZ: Tensor

    @property
    def actor(self) -> Actor:
        return Actor(attempt_Y=self.th0_Y.softmax(-1), revision_YZA=self.th1_YZA.softmax(-1))

    @property
    def feedback_XYZ(self) -> Tensor:
        return self.ph_XYZ.softmax(-1)


def make_game(seed: int = 0) -> Game:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    return Game(
        reward_XA=uniform(X, A),
        reward0_XY=uniform(X, Y),
        th0_Y=normal(Y),
        th1_YZA=normal(Y, Z, A),
        ph_XYZ=normal(X, Y, Z),
    )


def expected_reward(game: Game, ph_XYZ: Tensor, actor: Actor) -> Tensor:
    """J(ph, th)."""
    answer_XA = torch.einsum(
        "y,xyz,yza->xa", actor.attempt_Y, ph_XYZ.softmax(-1), actor.revision_YZA
    )
    return (answer_XA * game.reward_XA).sum() / X


def best_response(game: Game, ph_XYZ: Tensor) -> Actor:
    """argmax_th J(ph, th) in closed form: to each (y0, z) the best answer given the posterior."""
    gain_YZA = torch.einsum("xyz,xa->yza", ph_XYZ.softmax(-1), game.reward_XA) / X
    best_YZ = gain_YZA.argmax(-1)
    best_y = gain_YZA.amax(-1).sum(-1).argmax()
    return Actor(
        attempt_Y=torch.nn.functional.one_hot(best_y, Y).double(),
        revision_YZA=torch.nn.functional.one_hot(best_YZ, A).double(),
    )


def differences(function: Callable[[Tensor], Tensor], at: Tensor, step: float = 1e-5) -> Tensor:
    """Central finite differences of a scalar function of one table."""
    gradient = torch.zeros_like(at)
    for index in itertools.product(*(range(size) for size in at.shape)):
        shift = torch.zeros_like(at)
        shift[index] = step
        gradient[index] = (function(at + shift) - function(at - shift)) / (2 * step)
    return gradient


def outcomes(*sizes: int) -> list[Tensor]:
    """Every combination of indices, one column each, [D]."""
    return list(torch.cartesian_prod(*(torch.arange(size) for size in sizes)).T)


def score(probability: Tensor, choice: Tensor) -> Tensor:
    """grad log softmax of the choice with respect to its row of logits."""
    return torch.nn.functional.one_hot(choice, probability.shape[-1]) - probability


def accumulate(shape: tuple[int, ...], index: tuple[Tensor, ...], rows: Tensor) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64).index_put(index, rows, accumulate=True)


def yes(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.bool)


def leader_mean(
    game: Game, star: Actor, lam: float, *, attempt_ratio: bool, actor: Actor | None = None
) -> Tensor:
    """Exact mean of the recipe's critic gradient with F = 2, M = 1: play and probe enumerated."""
    actor = actor or game.actor
    x, y, z1, z2, a1, a2, s1, s2 = outcomes(X, Y, Z, Z, A, A, A, A)
    z, a, s = torch.stack([z1, z2], 1), torch.stack([a1, a2], 1), torch.stack([s1, s2], 1)
    x_F, y_F = x[:, None], y[:, None]
    chance = actor.attempt_Y[y] / X
    chance = chance * game.feedback_XYZ[x_F, y_F, z].prod(1)
    chance = chance * actor.revision_YZA[y_F, z, a].prod(1) * star.revision_YZA[y_F, z, s].prod(1)
    ones_DFM = yes(x.numel(), 2, 1)
    utility = leader_utility(
        feedback_value(game.reward_XA[x_F, a].unsqueeze(-1), ones_DFM),
        feedback_value(game.reward_XA[x_F, s].unsqueeze(-1), ones_DFM),
        lam,
        star_weight=(star.attempt_Y / actor.attempt_Y)[y_F] if attempt_ratio else None,
    )
    credit, _ = leader_credit(utility, ones_DFM[..., 0])
    rows = (chance[:, None] * credit / 2).unsqueeze(-1) * score(game.feedback_XYZ[x_F, y_F], z)
    return accumulate((X, Y, Z), (x_F.expand_as(z), y_F.expand_as(z)), rows)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("lam", LAMS)
def test_critic_estimator_is_the_gradient_of_the_penalised_objective(lam, seed):
    game = make_game(seed)
    star = best_response(game, game.ph_XYZ)

    def penalised(ph: Tensor) -> Tensor:  # th* answers anew to every ph: Danskin has to hold
        played = expected_reward(game, ph, game.actor)
        return played + lam * (played - expected_reward(game, ph, best_response(game, ph)))

    truth = differences(penalised, game.ph_XYZ)
    mean = leader_mean(game, star, lam, attempt_ratio=True)
    assert truth.abs().max() > 1e-3
    torch.testing.assert_close(mean, truth, atol=1e-6, rtol=0)


@pytest.mark.parametrize("lam", LAMS)
def test_without_attempt_ratio_the_penalty_is_taken_on_the_attempts_played(lam):
    game = make_game()
    star = best_response(game, game.ph_XYZ)
    mixed = Actor(attempt_Y=game.actor.attempt_Y, revision_YZA=star.revision_YZA)

    def penalised_here(ph: Tensor) -> Tensor:
        played = expected_reward(game, ph, game.actor)
        return played + lam * (played - expected_reward(game, ph, mixed))

    truth = differences(penalised_here, game.ph_XYZ)
    mean = leader_mean(game, star, lam, attempt_ratio=False)
    torch.testing.assert_close(mean, truth, atol=1e-6, rtol=0)
    if lam > 0:  # and that is another direction, which is why the ratio can be asked for
        exact = leader_mean(game, star, lam, attempt_ratio=True)
        assert (exact - mean).abs().max() > 1e-3


@pytest.mark.parametrize("lam", LAMS)
def test_plain_chain_with_a_running_baseline_is_the_same_gradient(lam):
    # G = C = F = M = 1: one chain under th, one under th*, the two expectations of the paper.
    game = make_game()
    star = best_response(game, game.ph_XYZ)
    total = torch.zeros(X, Y, Z, dtype=torch.float64)
    for actor, factor in ((game.actor, 1 + lam), (star, -lam)):
        x, y, z, a = outcomes(X, Y, Z, A)
        feedback = game.feedback_XYZ[x, y]
        chance = actor.attempt_Y[y] * feedback.gather(1, z[:, None])[:, 0] / X
        chance = chance * actor.revision_YZA[y, z, a]
        reward = game.reward_XA[x, a]
        advantage, _, _ = running_baseline(reward, yes(reward.numel()), baseline=0.37)
        rows = (factor * chance * advantage)[:, None] * score(feedback, z)
        total += accumulate((X, Y, Z), (x, y), rows)

    def penalised(ph: Tensor) -> Tensor:
        played = expected_reward(game, ph, game.actor)
        return played + lam * (played - expected_reward(game, ph, star))

    torch.testing.assert_close(total, differences(penalised, game.ph_XYZ), atol=1e-6, rtol=0)


@pytest.mark.parametrize("lam", LAMS)
def test_actor_estimators_are_the_gradient_of_the_penalised_objective(lam):
    game = make_game()
    star = best_response(game, game.ph_XYZ)

    def penalised(th0: Tensor, th1: Tensor) -> Tensor:
        actor = Actor(attempt_Y=th0.softmax(-1), revision_YZA=th1.softmax(-1))
        played = expected_reward(game, game.ph_XYZ, actor)
        return played + lam * (played - expected_reward(game, game.ph_XYZ, star))

    # Revisions, F = 2, M = 1. A mean that holds the row itself shrinks the gradient by (n-1)/n.
    x, y, z1, z2, a1, a2 = outcomes(X, Y, Z, Z, A, A)
    z, a = torch.stack([z1, z2], 1), torch.stack([a1, a2], 1)
    x_F, y_F = x[:, None], y[:, None]
    chance = game.actor.attempt_Y[y] * game.feedback_XYZ[x_F, y_F, z].prod(1) / X
    chance = chance * game.actor.revision_YZA[y_F, z, a].prod(1)
    reward = game.reward_XA[x_F, a].unsqueeze(-1)
    credit, _ = revision_credit(reward, yes(*reward.shape), torch.zeros(x.numel()), yes(x.numel()))
    rows = (chance[:, None] * credit[..., 0] / 2).unsqueeze(-1)
    rows = rows * score(game.actor.revision_YZA[y_F, z], a)
    mean1 = accumulate((Y, Z, A), (y_F.expand_as(z), z), rows) * 2 * (1 + lam)
    truth1 = differences(lambda th1: penalised(game.th0_Y, th1), game.th1_YZA)
    torch.testing.assert_close(mean1, truth1, atol=1e-6, rtol=0)

    # Attempts, G = C = 2, F = M = 1, with the return of the revision only.
    x, y1, y2, z1, z2, a1, a2 = outcomes(X, Y, Y, Z, Z, A, A)
    y, z, a = (torch.stack(pair, 1) for pair in ((y1, y2), (z1, z2), (a1, a2)))
    x_G = x[:, None].expand_as(y)
    chance = (
        game.actor.attempt_Y[y] * game.feedback_XYZ[x_G, y, z] * game.actor.revision_YZA[y, z, a]
    ).prod(1) / X
    count = y.numel()
    group = torch.arange(x.numel()).repeat_interleave(2)
    credit, _ = attempt_credit(
        torch.zeros(count, dtype=torch.float64), group, yes(count),
        game.reward_XA[x_G, a].reshape(-1), yes(count), w0=0.0, g=1.0,
    )  # fmt: skip
    rows = (chance[:, None] * credit.view(-1, 2) / 2).unsqueeze(-1)
    rows = rows * score(game.actor.attempt_Y.expand(*y.shape, Y), y)
    mean0 = rows.sum((0, 1)) * 2 * (1 + lam)
    truth0 = differences(lambda th0: penalised(th0, game.th1_YZA), game.th0_Y)
    assert truth0.abs().max() > 5e-4 and truth1.abs().max() > 5e-3
    torch.testing.assert_close(mean0, truth0, atol=1e-6, rtol=0)


def test_criticising_some_attempts_biases_neither_term():
    # G = 3, C = 2 drawn naturally. First term: (1 - 1/G) grad w0 E R(y0). Second: two of three
    # carry it, centred among themselves, so (C/G) (1 - 1/C) g grad J.
    game = make_game()
    w0, g = 1.0, 0.3
    total = torch.zeros(Y, dtype=torch.float64)
    for chosen in ((0, 1), (0, 2), (1, 2)):
        x, ya, yb, yc, z1, z2, a1, a2 = outcomes(X, Y, Y, Y, Z, Z, A, A)
        y = torch.stack([ya, yb, yc], 1)
        z, a = torch.stack([z1, z2], 1), torch.stack([a1, a2], 1)
        x_G, criticised = x[:, None], y[:, list(chosen)]
        chance = game.actor.attempt_Y[y].prod(1) / X / 3
        chance = chance * game.feedback_XYZ[x_G, criticised, z].prod(1)
        chance = chance * game.actor.revision_YZA[criticised, z, a].prod(1)
        followup = torch.full(y.shape, float("nan"), dtype=torch.float64)
        followup[:, list(chosen)] = game.reward_XA[x_G, a]
        credit, _ = attempt_credit(
            game.reward0_XY[x_G, y].reshape(-1),
            torch.arange(x.numel()).repeat_interleave(3),
            yes(y.numel()),
            followup.reshape(-1),
            ~followup.isnan().reshape(-1),
            w0=w0,
            g=g,
        )
        rows = (chance[:, None] * credit.view(-1, 3) / 3).unsqueeze(-1)
        total += (rows * score(game.actor.attempt_Y.expand(*y.shape, Y), y)).sum((0, 1))

    def returns(th0: Tensor) -> Tensor:
        actor = Actor(attempt_Y=th0.softmax(-1), revision_YZA=game.actor.revision_YZA)
        first = (game.reward0_XY.mean(0) * actor.attempt_Y).sum()
        second = expected_reward(game, game.ph_XYZ, actor)
        return w0 * (2 / 3) * first + g * (2 / 3) * (1 / 2) * second

    torch.testing.assert_close(total, differences(returns, game.th0_Y), atol=1e-6, rtol=0)


@pytest.mark.parametrize("lam", LAMS)
def test_at_the_best_response_it_is_the_exact_stackelberg_gradient(lam):
    game = make_game()

    def leader_value(ph: Tensor) -> Tensor:  # F(ph) = max_th J(ph, th), th* moving with ph
        return expected_reward(game, ph, best_response(game, ph))

    truth = differences(leader_value, game.ph_XYZ)
    star = best_response(game, game.ph_XYZ)
    # An attempt that th* never makes has chance 0 and no ratio: play with its revisions only.
    mean = leader_mean(game, star, lam, attempt_ratio=False, actor=star)
    assert truth.abs().max() > 1e-3
    torch.testing.assert_close(mean, truth, atol=1e-6, rtol=0)


def test_the_estimator_tends_to_the_stackelberg_gradient_as_the_actor_adapts():
    game = make_game()
    star = best_response(game, game.ph_XYZ)
    truth = differences(lambda ph: expected_reward(game, ph, best_response(game, ph)), game.ph_XYZ)
    errors = []
    for rest in (1.0, 0.3, 0.1, 0.01):
        actor = Actor(
            attempt_Y=rest * game.actor.attempt_Y + (1 - rest) * star.attempt_Y,
            revision_YZA=rest * game.actor.revision_YZA + (1 - rest) * star.revision_YZA,
        )
        mean = leader_mean(game, star, 0.7, attempt_ratio=True, actor=actor)
        errors.append((mean - truth).norm().item())
    assert errors == sorted(errors, reverse=True) and errors[-1] < 0.02 * errors[0]


def regularised_response(game: Game, ph_XYZ: Tensor) -> tuple[Actor, Tensor]:
    """argmax_th of J - TAU KL(th || uniform) in closed form, and that maximum.

    Every choice of th* moves with ph here, so that a frozen th* is a claim and not a triviality.
    """
    joint_XYZ = ph_XYZ.softmax(-1) / X
    weight_YZ = joint_XYZ.sum(0)
    mean_YZA = torch.einsum("xyz,xa->yza", joint_XYZ, game.reward_XA) / weight_YZ.unsqueeze(-1)
    revision = (mean_YZA / TAU).softmax(-1)
    soft_YZ = TAU * (torch.logsumexp(mean_YZA / TAU, -1) - torch.tensor(float(A)).log())
    soft_Y = (weight_YZ * soft_YZ).sum(-1)
    attempt = (soft_Y / TAU).softmax(-1)
    best = TAU * (torch.logsumexp(soft_Y / TAU, -1) - torch.tensor(float(Y)).log())
    return Actor(attempt_Y=attempt, revision_YZA=revision), best


def test_no_gradient_through_the_response_is_needed_when_both_share_the_objective():
    game = make_game()
    star, _ = regularised_response(game, game.ph_XYZ)
    moved, _ = regularised_response(game, game.ph_XYZ + torch.eye(Z, dtype=torch.float64)[0])
    assert (moved.revision_YZA - star.revision_YZA).abs().max() > 1e-3
    truth = differences(lambda ph: regularised_response(game, ph)[1], game.ph_XYZ)
    # The shared reward of a chain is R - TAU log(pi1 / uniform); the attempt's own KL term does not
    # depend on z and drops out of its score.
    x, y, z1, z2, a1, a2 = outcomes(X, Y, Z, Z, A, A)
    z, a = torch.stack([z1, z2], 1), torch.stack([a1, a2], 1)
    x_F, y_F = x[:, None], y[:, None]
    chance = star.attempt_Y[y] * game.feedback_XYZ[x_F, y_F, z].prod(1) / X
    chance = chance * star.revision_YZA[y_F, z, a].prod(1)
    reward = game.reward_XA[x_F, a] - TAU * (star.revision_YZA[y_F, z, a] * A).log()
    played = feedback_value(reward.unsqueeze(-1), yes(*reward.shape, 1))
    # th = th*: the probe is the play, the penalty is 0 whatever lam is.
    utility = leader_utility(played, played.clone(), 0.7)
    credit, _ = leader_credit(utility, yes(*played.shape))
    rows = (chance[:, None] * credit / 2).unsqueeze(-1) * score(game.feedback_XYZ[x_F, y_F], z)
    mean = accumulate((X, Y, Z), (x_F.expand_as(z), y_F.expand_as(z)), rows)
    torch.testing.assert_close(mean, truth, atol=1e-6, rtol=0)


def draw(probability: Tensor, generator: torch.Generator) -> Tensor:
    """One index from each row of probabilities, by inversion."""
    uniform = torch.rand(*probability.shape[:-1], 1, generator=generator, dtype=torch.float64)
    return (uniform > probability.cumsum(-1)).sum(-1).clamp(max=probability.shape[-1] - 1)


def sample_trees(
    game: Game,
    star: Actor,
    num: int,
    generator: torch.Generator,
    num_feedbacks: int,
    num_tries: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Play and probe with 0/1 rewards: x, y [D], z [D, F], rewards and probe rewards [D, F, M]."""
    x = torch.randint(0, X, (num,), generator=generator)
    y = draw(game.actor.attempt_Y.expand(num, Y), generator)
    z = draw(game.feedback_XYZ[x, y][:, None].expand(num, num_feedbacks, Z), generator)
    rewards = []
    for actor in (game.actor, star):
        rows = actor.revision_YZA[y[:, None], z][:, :, None]
        answer = draw(rows.expand(num, num_feedbacks, num_tries, A), generator)
        chance = game.reward_XA[x[:, None, None], answer]
        uniform = torch.rand(chance.shape, generator=generator, dtype=torch.float64)
        rewards.append((uniform < chance).double())
    return x, y, z, rewards[0], rewards[1]


def test_sampled_estimator_is_unbiased_and_leave_one_out_lowers_its_variance():
    game, lam, num = make_game(), 0.7, 100_000
    star, _ = regularised_response(game, game.ph_XYZ)
    star = Actor(attempt_Y=game.actor.attempt_Y, revision_YZA=star.revision_YZA)
    generator = torch.Generator().manual_seed(0)

    def penalised(ph: Tensor) -> Tensor:
        played = expected_reward(game, ph, game.actor)
        return played + lam * (played - expected_reward(game, ph, star))

    truth = differences(penalised, game.ph_XYZ).reshape(-1)
    variances = {}
    for num_feedbacks, num_tries in ((4, 1), (4, 2)):
        x, y, z, reward, probe = sample_trees(game, star, num, generator, num_feedbacks, num_tries)
        utility = leader_utility(
            feedback_value(reward, yes(*reward.shape)),
            feedback_value(probe, yes(*probe.shape)),
            lam,
        )
        credit, trainable = leader_credit(utility, yes(*utility.shape))
        assert 0.0 < trainable.double().mean() < 1.0  # some groups have no variance: skipped
        scores = score(game.feedback_XYZ[x, y][:, None].expand(*z.shape, Z), z)
        for name, weight in (("none", utility), ("leave-one-out", credit)):
            each = torch.zeros(num, X * Y, Z, dtype=torch.float64)
            each[torch.arange(num), x * Y + y] = (weight.unsqueeze(-1) * scores).mean(1)
            each = each.view(num, -1)
            standard_error = each.std(0) / num**0.5
            assert (truth / standard_error).abs().max() > 10.0  # a wrong sign would be seen
            error = (each.mean(0) - truth) / standard_error
            assert error.abs().max() < 3.0, (name, error)
            variances[name, num_tries] = each.var(0).sum().item()
    for num_tries in (1, 2):
        ratio = variances["none", num_tries] / variances["leave-one-out", num_tries]
        print(f"F=4 M={num_tries}: variance without baseline / leave-one-out = {ratio:.2f}")
        assert ratio > 1.1
    gain = variances["leave-one-out", 1] / variances["leave-one-out", 2]
    print(f"leave-one-out, M=1 / M=2 = {gain:.2f}")
    assert gain > 1.3

"""topk_divergence from logits against algo.distill in float64, which takes whole log-softmaxes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_binac.algo import distill
from megatron_binac.kernels import topk_divergence


def truth(
    student: Tensor, teacher: Tensor, top_k: int, alpha: float, temperature: float, real: int
) -> tuple[Tensor, Tensor]:
    """Divergence [T] and the gradient of its weighted sum by the student's logits."""
    student = student.detach().cpu().double().requires_grad_()
    logq = (student[:, :real] / temperature).log_softmax(-1)
    logp = (teacher.detach().cpu().double()[:, :real] / temperature).log_softmax(-1)
    ids = logq.topk(min(top_k, real), dim=-1).indices
    divergence = distill.topk_divergence(logq.gather(1, ids), logp.gather(1, ids), alpha)
    (divergence * weights(divergence)).sum().backward()
    assert student.grad is not None
    return divergence.detach(), student.grad


def weights(like: Tensor) -> Tensor:
    return torch.arange(1, like.numel() + 1, dtype=like.dtype, device=like.device).cos()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize(
    ("num_tokens", "num_columns", "top_k"), [(1, 5, 2), (63, 129, 20), (17, 32003, 100)]
)
def test_values_and_gradient(
    num_tokens: int, num_columns: int, top_k: int, alpha: float, device: torch.device
) -> None:
    student = (2 * torch.randn(num_tokens, num_columns)).to(device).requires_grad_()
    teacher = (2 * torch.randn(num_tokens, num_columns)).to(device)
    got = topk_divergence(student, teacher, top_k=top_k, alpha=alpha, temperature=0.8)
    (got * weights(got)).sum().backward()
    want, want_grad = truth(student, teacher, top_k, alpha, 0.8, num_columns)
    torch.testing.assert_close(got.detach().cpu().double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(student.grad.cpu().double(), want_grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_bfloat16_padding_and_masked_rows(alpha: float, device: torch.device) -> None:
    student, teacher = (2 * torch.randn(2, 9, 40)).bfloat16().to(device)
    student[:, 33:], teacher[:, 33:] = 50.0, torch.nan
    mask = torch.tensor([True, False, True] * 3)
    student[~mask.to(device)] = torch.nan
    student.requires_grad_()
    got = topk_divergence(
        student, teacher, top_k=5, alpha=alpha, num_real_columns=33, mask_T=mask.to(device)
    )
    (got[mask] * weights(got[mask])).sum().backward()
    want, want_grad = truth(student[mask], teacher[mask], 5, alpha, 1.0, 33)
    torch.testing.assert_close(got.detach().cpu().double()[mask], want, rtol=1e-5, atol=1e-6)
    assert got[~mask].abs().max().item() == 0.0
    grad = student.grad.cpu().double()
    torch.testing.assert_close(grad[mask], want_grad, rtol=2**-7, atol=2e-5)
    assert grad[~mask].abs().max().item() == 0.0 and grad[:, 33:].abs().max().item() == 0.0


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_all_columns_leave_an_empty_tail(alpha: float, device: torch.device) -> None:
    student = torch.tensor([[0.5, 0.25, 0.25]], device=device).log().requires_grad_()
    teacher = torch.tensor([[0.25, 0.5, 0.25]], device=device).log()
    got = topk_divergence(student, teacher, top_k=8, alpha=alpha)
    got.sum().backward()
    if alpha == 0.5:
        mix = [0.375, 0.375, 0.25]
        kl = 0.5 * math.log(0.5 / mix[0]) + 0.25 * math.log(0.25 / mix[1])
        assert got.item() == pytest.approx(kl, abs=1e-6)  # both halves are equal by symmetry
    else:
        assert got.item() == pytest.approx(0.25 * math.log(2), abs=1e-6)
    assert torch.isfinite(student.grad).all()
    assert student.grad.sum().item() == pytest.approx(0.0, abs=1e-6)


def test_equal_logits_have_no_divergence(device: torch.device) -> None:
    logits = (5 * torch.randn(4, 64)).to(device)
    for alpha in (0.0, 0.5, 1.0):
        student = logits.clone().requires_grad_()
        got = topk_divergence(student, logits, top_k=3, alpha=alpha)
        got.sum().backward()
        assert got.abs().max().item() < 1e-6
        assert student.grad.abs().max().item() < 1e-6


def test_a_tiny_tail_keeps_its_digits(device: torch.device) -> None:
    # The student's tail is e^-30; KL(teacher || student) is the teacher's tail times 30, not times
    # the logarithm of a rounding error.
    student = torch.tensor([[30.0, 0.0]], device=device)
    teacher = torch.zeros((1, 2), device=device)
    got = topk_divergence(student, teacher, top_k=1, alpha=0.0)
    assert got.item() == pytest.approx(0.5 * 30.0 - math.log(2), rel=1e-6)


def test_arguments_are_checked(device: torch.device) -> None:
    logits = torch.zeros(2, 4, device=device)
    with pytest.raises(ValueError, match="same tokens"):
        topk_divergence(logits, logits[:1], top_k=1, alpha=0.5)
    with pytest.raises(ValueError, match=r"alpha in \[0, 1\]"):
        topk_divergence(logits, logits, top_k=1, alpha=1.5)

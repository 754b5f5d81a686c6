"""token_logprob and logprob_from_logits against float64 autograd: values and every gradient.

Truth is torch's log_softmax in float64 on the same (rounded) inputs. Tolerances are relative to the
largest true element. float32: 1e-5. bfloat16: the outputs are float32, 1e-5 as well; gradients are
rounded to bfloat16, once by the reference (2^-8), and by Triton also as logit gradients before the
products (2^-6; its interpreter cuts bits off where a GPU rounds).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from megatron_binac.kernels import (
    logprob_from_logits,
    pack_support,
    sampling_support,
    support_from_ids,
    token_logprob,
    unpack_support,
)

ROWS_OF_TRUTH = 50


def truth_from_linear(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    *,
    temperature: float,
    real: int,
    keep: Tensor | None = None,
) -> dict[str, Tensor]:
    """log-prob, entropy and both gradients by float64 autograd, a few rows at a time."""
    hidden64 = hidden.detach().cpu().double().requires_grad_()
    weight64 = weight.detach().cpu().double().requires_grad_()
    labels, out = labels.cpu(), {"logprob": [], "entropy": []}
    for lo in range(0, labels.numel(), ROWS_OF_TRUTH):
        part = slice(lo, lo + ROWS_OF_TRUTH)
        logits = (hidden64[part] @ weight64.T)[:, :real] / temperature
        if keep is not None:
            on = keep[part, :real].clone().scatter_(1, labels[part, None], True)
            logits = logits.masked_fill(~on, -torch.inf)
        logp = logits.log_softmax(-1)
        entropy = -(logits.softmax(-1) * torch.where(logp == -torch.inf, 0.0, logp)).sum(-1)
        logprob = logp.gather(1, labels[part, None])[:, 0]
        loss = (logprob * grad_logprob[part].cpu()).sum() + (
            entropy * grad_entropy[part].cpu()
        ).sum()
        loss.backward()
        out["logprob"].append(logprob.detach())
        out["entropy"].append(entropy.detach())
    return {
        "logprob": torch.cat(out["logprob"]),
        "entropy": torch.cat(out["entropy"]),
        "grad_hidden": hidden64.grad,
        "grad_weight": weight64.grad,
    }


def assert_near(got: Tensor, want: Tensor, relative: float, what: str) -> None:
    scale = max(float(want.abs().max()), 1e-3)
    error = float((got.detach().cpu().double() - want).abs().max())
    assert error <= relative * scale, f"{what}: off by {error:.3e} at scale {scale:.3e}"


def make_inputs(
    num_tokens: int, num_columns: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    hidden = torch.randn(num_tokens, width).to(device, dtype).requires_grad_()
    weight = torch.randn(num_columns, width).to(device, dtype).requires_grad_()
    labels = torch.randint(0, num_columns, (num_tokens,), device=device)
    return (
        hidden,
        weight,
        labels,
        torch.randn(num_tokens).double(),
        torch.randn(num_tokens).double(),
    )


def gradient_tolerance(dtype: torch.dtype, uses_triton: bool) -> float:
    if dtype == torch.bfloat16:
        return 2**-6 if uses_triton else 2**-8
    return 1e-5


SHAPES = [
    pytest.param(1, 5, 8, id="T1-V5"),
    pytest.param(63, 129, 24, id="T63-V129"),
    pytest.param(1000, 129, 64, id="T1000-V129"),
    pytest.param(63, 32003, 16, id="T63-V32003"),
    pytest.param(63, 129920, 8, id="T63-V129920", marks=pytest.mark.slow),
    pytest.param(1000, 32003, 8, id="T1000-V32003", marks=pytest.mark.slow),
    pytest.param(1000, 129920, 8, id="T1000-V129920", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("num_tokens", "num_columns", "width"), SHAPES)
def test_linear_values_and_gradients(
    num_tokens: int,
    num_columns: int,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    uses_triton: bool,
) -> None:
    hidden, weight, labels, grad_logprob, grad_entropy = make_inputs(
        num_tokens, num_columns, width, dtype, device
    )
    want = truth_from_linear(
        hidden, weight, labels, grad_logprob, grad_entropy, temperature=0.7, real=num_columns
    )
    logprob, entropy = token_logprob(hidden, weight, labels, temperature=0.7, with_entropy=True)
    loss = (logprob * grad_logprob.to(logprob)).sum() + (entropy * grad_entropy.to(logprob)).sum()
    loss.backward()
    assert logprob.dtype == torch.float32
    assert logprob.max().item() <= 0.0
    assert_near(logprob, want["logprob"], 1e-5, "log-prob")
    assert_near(entropy, want["entropy"], 1e-5, "entropy")
    relative = gradient_tolerance(dtype, uses_triton)
    assert_near(hidden.grad, want["grad_hidden"], relative, "grad of hidden")
    assert_near(weight.grad, want["grad_weight"], relative, "grad of weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    ("num_tokens", "num_columns"), [(1, 5), (63, 129), (1000, 129), (63, 32003)]
)
def test_given_logits_values_and_gradient(
    num_tokens: int, num_columns: int, dtype: torch.dtype, device: torch.device, uses_triton: bool
) -> None:
    # Identity weights make the logits themselves the hidden state of the truth.
    logits = (3 * torch.randn(num_tokens, num_columns)).to(device, dtype).requires_grad_()
    labels = torch.randint(0, num_columns, (num_tokens,), device=device)
    grad_logprob, grad_entropy = torch.randn(2, num_tokens).double()
    logits64 = logits.detach().cpu().double().requires_grad_()
    logp = (logits64 / 1.3).log_softmax(-1)
    want_entropy = -(logp.exp() * logp).sum(-1)
    want_logprob = logp.gather(1, labels.cpu()[:, None])[:, 0]
    ((want_logprob * grad_logprob).sum() + (want_entropy * grad_entropy).sum()).backward()

    logprob, entropy = logprob_from_logits(logits, labels, temperature=1.3, with_entropy=True)
    loss = (logprob * grad_logprob.to(logprob)).sum() + (entropy * grad_entropy.to(logprob)).sum()
    loss.backward()
    assert_near(logprob, want_logprob.detach(), 1e-5, "log-prob")
    assert_near(entropy, want_entropy.detach(), 1e-5, "entropy")
    assert logits64.grad is not None
    assert_near(
        logits.grad, logits64.grad, gradient_tolerance(dtype, uses_triton), "grad of logits"
    )


def test_gradcheck_in_float64() -> None:
    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 6, 3, 3])

    def both(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        return token_logprob(
            hidden, weight, labels, temperature=0.6, with_entropy=True, chunk_size=3
        )

    assert torch.autograd.gradcheck(both, (hidden, weight))


@pytest.mark.parametrize("chunk_size", [1, 7, 19])
def test_chunk_size_changes_nothing(chunk_size: int, device: torch.device) -> None:
    hidden, weight, labels, grad_logprob, _ = make_inputs(20, 5000, 16, torch.float32, device)
    results = []
    for size in (None, chunk_size):
        hidden.grad = weight.grad = None
        logprob, _ = token_logprob(hidden, weight, labels, chunk_size=size)
        (logprob * grad_logprob.to(logprob)).sum().backward()
        results.append((logprob.detach(), hidden.grad, weight.grad))
    for one, other in zip(*results, strict=True):
        assert_near(one, other.cpu().double(), 1e-5, "chunked")


@pytest.mark.parametrize("num_columns", [8, 129920 + 64])
def test_phantom_columns_do_not_count(num_columns: int, device: torch.device) -> None:
    # All logits -10 over V real columns: log-prob is -ln V, whatever block size rounds V up to.
    real = 5 if num_columns == 8 else 129920
    logits = torch.full((2, num_columns), -10.0, device=device)
    logits[:, real:] = 0.0
    labels = torch.tensor([0, real - 1], device=device)
    logprob, entropy = logprob_from_logits(logits, labels, num_real_columns=real, with_entropy=True)
    assert logprob.tolist() == pytest.approx([-math.log(real)] * 2, abs=2e-6)
    assert entropy.tolist() == pytest.approx([math.log(real)] * 2, abs=2e-6)
    hidden = torch.full((2, 1), -10.0, device=device)
    weight = torch.ones((num_columns, 1), device=device)
    weight[real:] = torch.nan
    logprob, _ = token_logprob(hidden, weight, labels, num_real_columns=real)
    assert logprob.tolist() == pytest.approx([-math.log(real)] * 2, abs=2e-6)


def test_padded_vocabulary_is_outside_the_softmax(device: torch.device) -> None:
    """With the pad inside, the entropy would be 0.000780 (case 11)."""
    logits = torch.tensor([[-10.0, -11.0, -12.0, 0.0]], device=device).expand(3, 4)
    labels = torch.arange(3, device=device)
    logprob, entropy = logprob_from_logits(logits, labels, num_real_columns=3, with_entropy=True)
    assert logprob.tolist() == pytest.approx([-0.407606, -1.407606, -2.407606], abs=1e-6)
    assert entropy.tolist() == pytest.approx([0.832396] * 3, abs=1e-6)


def test_entropy_is_of_the_distribution(device: torch.device) -> None:
    logits = torch.zeros((1, 4), device=device)
    _, entropy = logprob_from_logits(logits, torch.tensor([2], device=device), with_entropy=True)
    assert entropy.item() == pytest.approx(1.386294, abs=1e-6)


def test_temperature_divides_logits(device: torch.device) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]], device=device).expand(3, 3)
    logprob, _ = logprob_from_logits(logits, torch.arange(3, device=device), temperature=0.5)
    assert logprob.tolist() == pytest.approx([-0.142932, -2.142932, -4.142932], abs=1e-6)


def test_masked_rows_are_not_looked_at(device: torch.device) -> None:
    hidden = torch.randn(6, 16)
    mask = torch.tensor([True, False, True, True, False, False])
    hidden[~mask] = torch.nan
    hidden = hidden.to(device).requires_grad_()
    weight = torch.randn(40, 16).to(device).requires_grad_()
    labels = torch.tensor([3, -100, 39, 0, 10**6, -1], device=device)
    grad = torch.randn(2, 6).double()
    logprob, entropy = token_logprob(
        hidden, weight, labels, mask_T=mask.to(device), with_entropy=True
    )
    ((logprob * grad[0].to(logprob)).sum() + (entropy * grad[1].to(logprob)).sum()).backward()
    want = truth_from_linear(
        hidden[mask], weight, labels[mask], grad[0][mask], grad[1][mask], temperature=1.0, real=40
    )
    assert logprob[~mask].tolist() == [0.0] * 3
    assert entropy[~mask].tolist() == [0.0] * 3
    assert hidden.grad[~mask].abs().max().item() == 0.0
    assert_near(logprob[mask], want["logprob"], 1e-5, "log-prob")
    assert_near(entropy[mask], want["entropy"], 1e-5, "entropy")
    assert_near(hidden.grad[mask], want["grad_hidden"], 1e-5, "grad of hidden")
    assert_near(weight.grad, want["grad_weight"], 1e-5, "grad of weight")


@pytest.mark.parametrize("mask", [None, [False, False]], ids=["no row", "all masked"])
def test_nothing_to_score_keeps_the_graph(mask: list[bool] | None, device: torch.device) -> None:
    num_tokens = 0 if mask is None else 2
    hidden = torch.randn(num_tokens, 4, device=device, requires_grad=True)
    weight = torch.randn(5, 4, device=device, requires_grad=True)
    labels = torch.zeros(num_tokens, dtype=torch.long, device=device)
    mask_T = None if mask is None else torch.tensor(mask, device=device)
    logprob, entropy = token_logprob(hidden, weight, labels, mask_T=mask_T, with_entropy=True)
    (logprob.sum() + entropy.sum()).backward()
    assert logprob.tolist() == [0.0] * num_tokens
    assert weight.grad.abs().max().item() == 0.0
    assert hidden.grad.shape == hidden.shape


def test_extreme_and_infinite_logits(device: torch.device) -> None:
    inf = math.inf
    logits = torch.tensor(
        [
            [3e4, -3e4, 0.0, 1.0],
            [-inf, 2.0, -inf, 2.0],
            [-3e38, -3e38, -inf, -3e38],
            [88.0, 89.0, -1e9, 90.0],
        ],
        device=device,
        requires_grad=True,
    )
    labels = torch.tensor([0, 1, 1, 0], device=device)
    logprob, entropy = logprob_from_logits(logits, labels, with_entropy=True)
    (logprob.sum() + entropy.sum()).backward()
    lse = math.log(1 + math.exp(-1) + math.exp(-2))
    assert logprob.tolist() == pytest.approx([0.0, -math.log(2), -math.log(3), -2 - lse], abs=1e-6)
    p = [math.exp(-i) / (1 + math.exp(-1) + math.exp(-2)) for i in range(3)]
    want = [0.0, math.log(2), math.log(3), -sum(q * math.log(q) for q in p)]
    assert entropy.tolist() == pytest.approx(want, abs=1e-6)
    assert torch.isfinite(logits.grad).all()
    assert logits.grad[1].tolist() == pytest.approx([0.0, 0.5, 0.0, -0.5], abs=1e-6)


def test_a_label_without_probability_is_minus_infinity(device: torch.device) -> None:
    logits = torch.tensor([[0.0, -math.inf]], device=device)
    logprob, _ = logprob_from_logits(logits, torch.tensor([1], device=device))
    assert logprob.item() == -math.inf


@pytest.mark.parametrize("row", [[math.inf, 0.0], [math.nan, 0.0], [-math.inf, -math.inf]])
def test_a_broken_row_is_nan_and_alone(row: list[float], device: torch.device) -> None:
    # Not hidden as a finite number: the trainer's finite check has to see it.
    logits = torch.tensor([row, [1.0, 0.0]], device=device, requires_grad=True)
    logprob, _ = logprob_from_logits(logits, torch.tensor([0, 0], device=device))
    logprob.sum().backward()
    assert math.isnan(logprob[0].item())
    assert logits.grad[0].isnan().any()
    assert logprob[1].item() == pytest.approx(-math.log(1 + math.exp(-1)), abs=1e-6)
    assert torch.isfinite(logits.grad[1]).all()


def test_first_ratio_is_exactly_one(device: torch.device) -> None:
    hidden, weight, labels, *_ = make_inputs(63, 129, 24, torch.bfloat16, device)
    one, _ = token_logprob(hidden, weight, labels, temperature=0.7)
    other, _ = token_logprob(hidden.detach(), weight, labels, temperature=0.7, with_entropy=True)
    assert torch.equal(one, other)


@pytest.mark.parametrize("flag", [True, False], ids=["grad_added_to_main_grad", "no flag"])
def test_main_grad_is_added_to(flag: bool, device: torch.device, uses_triton: bool) -> None:
    hidden, weight, labels, grad_logprob, _ = make_inputs(63, 129, 24, torch.bfloat16, device)
    want = truth_from_linear(
        hidden, weight, labels, grad_logprob, 0 * grad_logprob, temperature=1.0, real=129
    )
    weight.main_grad = torch.full((129, 24), 2.0, device=device)
    if flag:
        weight.grad_added_to_main_grad = False
    for _ in range(2):
        logprob, _ = token_logprob(hidden, weight, labels, accumulate_into_main_grad=True)
        (logprob * grad_logprob.to(logprob)).sum().backward()
    relative = 2**-6 if uses_triton else 1e-5  # the reference never rounds on this way
    assert_near(weight.main_grad, 2.0 + 2 * want["grad_weight"], relative, "main_grad")
    if flag:
        assert weight.grad_added_to_main_grad is True
    else:
        assert weight.grad is None


def test_frozen_parts_get_no_gradient(device: torch.device) -> None:
    hidden, weight, labels, *_ = make_inputs(5, 9, 4, torch.float32, device)
    logprob, _ = token_logprob(hidden, weight.detach(), labels)
    logprob.sum().backward()
    assert hidden.grad is not None and weight.grad is None
    hidden.grad = None
    logprob, _ = token_logprob(hidden.detach(), weight, labels)
    logprob.sum().backward()
    assert hidden.grad is None and weight.grad is not None


@pytest.mark.parametrize("how", ["linear", "logits"])
def test_support_restricts_the_softmax(how: str, device: torch.device) -> None:
    hidden, weight, labels, grad_logprob, grad_entropy = make_inputs(
        63, 129, 16, torch.float32, device
    )
    keep = torch.rand(63, 129) < 0.2
    support = pack_support(keep.to(device))
    labels = labels.clamp(max=119)
    want = truth_from_linear(
        hidden, weight, labels, grad_logprob, grad_entropy, temperature=0.9, real=120, keep=keep
    )
    score = partial(token_logprob, hidden, weight)
    if how == "logits":
        score = partial(logprob_from_logits, hidden @ weight.T)
    logprob, entropy = score(
        labels, temperature=0.9, num_real_columns=120, support_TW=support, with_entropy=True
    )
    loss = (logprob * grad_logprob.to(logprob)).sum() + (entropy * grad_entropy.to(logprob)).sum()
    loss.backward()
    assert_near(logprob, want["logprob"], 1e-5, "log-prob")
    assert_near(entropy, want["entropy"], 1e-5, "entropy")
    assert_near(hidden.grad, want["grad_hidden"], 1e-5, "grad of hidden")
    assert_near(weight.grad, want["grad_weight"], 1e-5, "grad of weight")


def test_processed_log_probs_are_off_by_the_kept_mass(device: torch.device) -> None:
    # p = [.6, .3, .1] at top-p .9: the engine renormalises over the first two.
    logits = torch.tensor([[0.6, 0.3, 0.1]], device=device).log()
    labels = torch.tensor([0], device=device)
    support = sampling_support(logits, top_p=0.9)
    assert unpack_support(support, 3).tolist() == [[True, True, False]]
    raw, _ = logprob_from_logits(logits, labels)
    processed, _ = logprob_from_logits(logits, labels, support_TW=support)
    assert (processed - raw).item() == pytest.approx(-math.log(0.9), abs=1e-6)
    # A label off the support was sampled all the same (engine and trainer differ in the last bits).
    logprob, _ = logprob_from_logits(logits, torch.tensor([2], device=device), support_TW=support)
    assert logprob.item() == pytest.approx(math.log(0.1), abs=1e-6)


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(None, 0.9), (3, None), (4, 0.5), (50, 0.95), (None, 1.0), (None, 1e-5)]
)
def test_sampling_support_by_sorting(
    top_k: int | None, top_p: float | None, device: torch.device
) -> None:
    logits = 3 * torch.randn(20, 129)
    logits[3] = logits[3].round()
    want = torch.zeros(20, 129, dtype=torch.bool)
    for row, values in enumerate(logits.double()):
        left = values.clone()
        if top_k is not None:
            left[values < values.sort(descending=True).values[top_k - 1]] = -torch.inf
        if top_p is not None:
            p = left.softmax(0)
            ordered = p.sort(descending=True).values
            last = int((ordered.cumsum(0) < top_p - 1e-6).sum())
            left[p < ordered[last]] = -torch.inf
        want[row] = left > -torch.inf
    got = sampling_support(logits.to(device), top_k=top_k, top_p=top_p)
    assert torch.equal(unpack_support(got, 129).cpu(), want)


def test_support_from_the_engines_ids() -> None:
    ids = torch.tensor([[0, 31, -1], [32, 5, 40]])
    support = support_from_ids(ids, num_shard_columns=33)
    kept = [row.nonzero().squeeze(1).tolist() for row in unpack_support(support, 33)]
    assert kept == [[0, 31], [5, 32]]
    second_shard = support_from_ids(ids, num_shard_columns=33, first_column=33)
    assert [row.nonzero().squeeze(1).tolist() for row in unpack_support(second_shard, 33)] == [
        [],
        [7],
    ]


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([5], {"num_real_columns": 5}, r"in \[0, 5\), got 5"),
        ([-100], {}, "mask_T"),
        ([0], {"temperature": 0.0}, "temperature must be > 0"),
        ([0], {"num_real_columns": 9}, "num_real_columns must be in"),
        ([0], {"first_column": 4}, "without num_real_columns"),
        ([0], {"mask_T": torch.tensor([1])}, "mask must be bool"),
        ([0], {"support_TW": torch.zeros(1, 2, dtype=torch.int32)}, "support must be int32"),
        ([0], {"accumulate_into_main_grad": True}, "main_grad"),
        ([0, 0], {}, "pad both"),
        ([0.0], {}, "integer"),
    ],
)
def test_wrong_arguments_say_what_to_do(
    labels: list[float], options: dict[str, object], message: str
) -> None:
    hidden = torch.zeros(1, 4, requires_grad=True)
    weight = torch.zeros(8, 4, requires_grad=True)
    with pytest.raises(ValueError, match=message):
        token_logprob(hidden, weight, torch.tensor(labels), **options)


def test_shapes_and_dtypes_are_checked() -> None:
    labels = torch.zeros(1, dtype=torch.long)
    with pytest.raises(ValueError, match=r"weight \[V, H\]"):
        token_logprob(torch.zeros(1, 4), torch.zeros(8, 5), labels)
    with pytest.raises(ValueError, match="one dtype"):
        token_logprob(torch.zeros(1, 4), torch.zeros(8, 4).bfloat16(), labels)
    with pytest.raises(ValueError, match="flatten"):
        logprob_from_logits(torch.zeros(2, 8), labels)


def test_peak_bytes_counts_what_is_alive(peak_extra_bytes: Callable[..., int]) -> None:
    x = torch.zeros(1000)

    def step() -> None:
        y = x + 1
        z = y * 2
        del y
        (z + 1).sum()

    assert peak_extra_bytes(step, x) == pytest.approx(2 * 4000, abs=64)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_extra_memory_is_two_percent_of_the_logits(
    dtype: torch.dtype,
    device: torch.device,
    uses_triton: bool,
    peak_extra_bytes: Callable[..., int],
) -> None:
    """T = 8192, V = 128k, against logits in the dtype of the inputs: all that is alive at once in a
    forward and a backward, but for inputs, gradients and the results of the size of T."""
    if uses_triton and device.type == "cpu":
        pytest.skip("minutes under the interpreter; test_offline.py counts on meta tensors")
    num_tokens, num_columns, width = 8192, 131072, 16
    hidden = torch.randn(num_tokens, width, device=device).to(dtype).requires_grad_()
    weight = torch.randn(num_columns, width, device=device).to(dtype).requires_grad_()
    labels = torch.randint(0, num_columns, (num_tokens,), device=device)
    weight.main_grad = torch.zeros(num_columns, width, device=device)

    def step() -> None:
        logprob, _ = token_logprob(hidden, weight, labels, accumulate_into_main_grad=True)
        logprob.sum().backward()

    extra = peak_extra_bytes(step, hidden, weight, labels, weight.main_grad)
    logits = num_tokens * num_columns * hidden.element_size()
    print(f"extra {extra / 2**20:.1f} MiB, {extra / logits:.2%} of the logits")
    assert extra <= 0.02 * logits

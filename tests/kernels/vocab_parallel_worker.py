"""One rank of test_vocab_parallel.py: four processes, groups of 1, 2 and 4 among them.

    python vocab_parallel_worker.py RANK WORLD_SIZE RENDEZVOUS_FILE

Every rank holds the full tensors (same seed), takes its shard, and compares what it gets with
float64 autograd over the whole vocabulary. Exit code 0 and a line a case, or a traceback.
"""

from __future__ import annotations

import datetime
import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_binac.kernels import (
    logprob_from_logits,
    pack_support,
    sampling_support,
    token_logprob,
    topk_divergence,
    unpack_support,
)

TEMPERATURE = 0.8
USES_TRITON = os.environ.get("BINAC_KERNELS") == "triton"


def truth(
    hidden: Tensor, weight: Tensor, labels: Tensor, mask: Tensor, keep: Tensor, real: int
) -> tuple[Tensor, ...]:
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = (hidden[mask] @ weight[:real].T) / TEMPERATURE
    on = keep[mask][:, :real].scatter(1, labels[mask, None], True)
    logits = logits.masked_fill(~on, -torch.inf)
    logp = logits.log_softmax(-1)
    logprob = logp.gather(1, labels[mask, None])[:, 0]
    entropy = -(logits.softmax(-1) * torch.where(on, logp, 0.0)).sum(-1)
    loss_of(logprob, entropy, mask).backward()
    return logprob.detach(), entropy.detach(), hidden.grad, weight.grad


def loss_of(logprob: Tensor, entropy: Tensor, mask: Tensor) -> Tensor:
    steps = torch.arange(mask.numel(), dtype=torch.float64)[mask]
    return (logprob * steps.cos()).sum() + (entropy * (2 * steps).sin()).sum()


def near(got: Tensor, want: Tensor, relative: float, what: str) -> None:
    scale = max(float(want.abs().max()) if want.numel() else 0.0, 1e-3)
    error = float((got.double() - want).abs().max()) if want.numel() else 0.0
    assert got.shape == want.shape, (what, got.shape, want.shape)
    assert error <= relative * scale, f"{what}: off by {error:.3e} at scale {scale:.3e}"


def check(
    group: dist.ProcessGroup,
    *,
    num_columns: int,
    real: int,
    num_tokens: int,
    dtype: torch.dtype,
    sequence_parallel: bool,
    masked: bool = False,
    supported: bool = False,
    main_grad: bool = False,
    bounds: list[int] | None = None,
) -> None:
    """``bounds``: first column of each shard and the end; default equal contiguous shards."""
    torch.manual_seed(num_columns * 31 + num_tokens)
    size, rank, width = group.size(), group.rank(), 12
    hidden = torch.randn(num_tokens, width).to(dtype)
    weight = torch.randn(num_columns, width).to(dtype)
    weight[real:] = torch.nan
    labels = torch.randint(0, real, (num_tokens,))
    labels[0], labels[-1] = 0, real - 1
    mask = torch.rand(num_tokens) < 0.6 if masked else torch.ones(num_tokens, dtype=torch.bool)
    mask[0] = True
    keep = torch.rand(num_tokens, num_columns) < (0.3 if supported else 2.0)
    want_logprob, want_entropy, want_hidden, want_weight = truth(
        hidden, torch.nan_to_num(weight), labels, mask, keep, real
    )
    if bounds is None:
        bounds = [i * (num_columns // size) for i in range(size + 1)]
    columns = slice(bounds[rank], bounds[rank + 1])
    rows = slice(None)
    if sequence_parallel:
        rows = slice(rank * num_tokens // size, (rank + 1) * num_tokens // size)
    mine = hidden[rows].clone().requires_grad_()
    shard = weight[columns].clone().requires_grad_()
    if main_grad:
        shard.main_grad = torch.zeros(shard.shape)
    logprob, entropy = token_logprob(
        mine,
        shard,
        labels,
        temperature=TEMPERATURE,
        num_real_columns=real,
        first_column=columns.start,
        tp_group=group,
        sequence_parallel=sequence_parallel,
        mask_T=mask if masked else None,
        support_TW=pack_support(keep[:, columns]) if supported else None,
        with_entropy=True,
        accumulate_into_main_grad=main_grad,
    )
    loss_of(logprob[mask], entropy[mask], mask).backward()
    relative = 1e-5
    if dtype == torch.bfloat16:
        relative = 2**-5 if USES_TRITON else 2**-6  # each rank's part is rounded before the sum
    near(logprob.detach()[mask], want_logprob, 1e-5, "log-prob")
    near(entropy.detach()[mask], want_entropy, 1e-5, "entropy")
    near(mine.grad, want_hidden[rows], relative, "grad of hidden")
    got_weight = shard.main_grad if main_grad else shard.grad
    near(got_weight, want_weight[columns], relative, "grad of weight shard")

    if not sequence_parallel:
        clean = torch.nan_to_num(shard.detach())
        logits = (mine.detach().float() @ clean.float().T).requires_grad_()
        logprob, entropy = logprob_from_logits(
            logits,
            labels,
            temperature=TEMPERATURE,
            num_real_columns=real,
            first_column=columns.start,
            tp_group=group,
            mask_T=mask if masked else None,
            support_TW=pack_support(keep[:, columns]) if supported else None,
            with_entropy=True,
        )
        loss_of(logprob[mask], entropy[mask], mask).backward()
        near(logprob.detach()[mask], want_logprob, 1e-5, "log-prob from logits")
        near(entropy.detach()[mask], want_entropy, 1e-5, "entropy from logits")
        parts = logits.grad @ clean.float()
        dist.all_reduce(parts, group=group)
        near(parts, want_hidden, 1e-5, "grad of logits")


def check_support(group: dist.ProcessGroup) -> None:
    torch.manual_seed(5)
    logits = 2 * torch.randn(6, 64)
    width = 64 // group.size()
    for top_k, top_p in ((5, None), (None, 0.8), (9, 0.6), (40, 0.9)):
        options = {"top_k": top_k, "top_p": top_p, "temperature": 0.7, "num_real_columns": 50}
        whole = unpack_support(sampling_support(logits, **options), 64)
        first = group.rank() * width
        part = sampling_support(
            logits[:, first : first + width], first_column=first, tp_group=group, **options
        )
        assert torch.equal(unpack_support(part, width), whole[:, first : first + width])


def check_topk(group: dist.ProcessGroup) -> None:
    torch.manual_seed(6)
    student, teacher = 2 * torch.randn(2, 6, 64)
    mask = torch.tensor([True, True, False, True, True, False])
    first = group.rank() * (64 // group.size())
    columns = slice(first, first + 64 // group.size())
    for alpha in (0.0, 0.5, 1.0):
        whole = student.double().requires_grad_()
        options = {"top_k": 9, "alpha": alpha, "num_real_columns": 50, "mask_T": mask}
        want = topk_divergence(whole, teacher.double(), **options)
        (want * torch.arange(6)).sum().backward()
        part = student[:, columns].clone().requires_grad_()
        got = topk_divergence(part, teacher[:, columns], tp_group=group, **options)
        (got * torch.arange(6)).sum().backward()
        near(got.detach(), want.detach(), 1e-5, "divergence")
        near(part.grad, whole.grad[:, columns], 1e-5, "grad of the student's logits")


def main() -> None:
    rank, world_size, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{file}",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=600),
    )
    groups = {}
    for size in (1, 2, 4):
        for first in range(0, world_size, size):
            ranks = list(range(first, first + size))
            group = dist.new_group(ranks)
            if rank in ranks:
                groups[size] = group
    fp32, bf16 = torch.float32, torch.bfloat16
    for size, group in groups.items():
        for sequence_parallel in (False, True):
            common = {"sequence_parallel": sequence_parallel}
            check(group, num_columns=132, real=129, num_tokens=64, dtype=fp32, **common)
            check(group, num_columns=132, real=129, num_tokens=64, dtype=bf16, **common)
            check(
                group, num_columns=132, real=120, num_tokens=64, dtype=fp32, masked=True,
                supported=True, main_grad=True, **common,
            )  # fmt: skip
            # Five real columns in eight: at TP 4 the last shard holds padding only.
            check(group, num_columns=8, real=5, num_tokens=4, dtype=fp32, **common)
        if size > 1:
            # A shard without a single row, between others.
            bounds = [0, 0, 7] if size == 2 else [0, 3, 3, 5, 7]
            check(
                group, num_columns=7, real=7, num_tokens=4, dtype=fp32, sequence_parallel=False,
                bounds=bounds,
            )  # fmt: skip
        check_support(group)
        check_topk(group)
        print(f"rank {rank}: tp {size} ok", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

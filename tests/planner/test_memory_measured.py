"""The planner's bytes against tensors that exist: both roles, split every way, on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
from helpers_ranks import Job

from megatron_binac.config import ModelConfig, ParallelConfig
from megatron_binac.planner.memory import static_bytes
from megatron_binac.planner.shapes import Shape

LENGTHS = [9, 32, 17, 24, 32, 12, 30, 8] * 8
SHAPES = {
    "actor": {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 176, "num_query_groups": 2},
    "critic": {"num_layers": 4, "hidden_size": 96, "ffn_hidden_size": 256, "num_query_groups": 4},
}


class _Held:
    """Bytes of distinct storages that autograd holds at one time, and their most."""

    def __init__(self, known: set[int]) -> None:
        self.known, self.open, self.now, self.most = known, {}, 0, 0

    def pack(self, tensor: Any) -> _Kept:
        return _Kept(self, tensor)


class _Kept:
    def __init__(self, held: _Held, tensor: Any) -> None:
        storage = tensor.untyped_storage()
        self.held, self.tensor, self.at = held, tensor, storage.data_ptr()
        if self.at not in held.known:
            count, _ = held.open.get(self.at, (0, 0))
            held.open[self.at] = (count + 1, storage.nbytes())
            if count == 0:
                held.now += storage.nbytes()
                held.most = max(held.most, held.now)

    def __del__(self) -> None:
        if self.at in self.held.known:
            return
        count, size = self.held.open.pop(self.at)
        if count > 1:
            self.held.open[self.at] = (count - 1, size)
        else:
            self.held.now -= size


def measure(layout: dict[str, Any], precision: str, distributed: bool) -> dict[str, Any]:
    """One rank: bytes of the tensors of both roles, and the planner's, after a real update."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from megatron_binac.config import (
        LossConfig,
        ModelConfig,
        OptimizerConfig,
        ParallelConfig,
        RoleConfig,
    )
    from megatron_binac.models.learner import MegatronLearner
    from megatron_binac.models.parallel import build_groups, start_distributed
    from megatron_binac.planner import memory
    from megatron_binac.planner.shapes import Shape
    from megatron_binac.types import TrainSequence

    start_distributed()
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {}
    for role, sizes in SHAPES.items():
        parallel = ParallelConfig(**layout)
        config = RoleConfig(
            model=ModelConfig(num_attention_heads=4, max_sequence_length=64, **sizes),
            parallel=parallel,
            optimizer=OptimizerConfig(distributed=distributed),
            precision=precision,  # type: ignore[arg-type]
            max_tokens_per_micro_batch=256,
        )
        groups = build_groups(role, parallel, 1)
        learner = MegatronLearner(
            role, config, groups, vocab_size=300, seed=1, num_steps=4, temperature=1.0
        )
        learner.hold_reference()
        rows = [
            TrainSequence(
                ids=rng.integers(0, 300, n).astype(np.int32),
                mask=np.arange(n) >= n - 4,
                logprobs=np.full(n, -1.0, np.float32),
            )
            for n in LENGTHS
        ]
        weights = {p.untyped_storage().data_ptr() for p in learner.parameters()}
        held = _Held(weights)
        plan = learner.plan(rows)
        with torch.autograd.graph.saved_tensors_hooks(held.pack, lambda kept: kept.tensor):
            learner.update(rows, LossConfig(kl_coef=0.0))
        shape = Shape.of(config.model, 300)
        counted = memory.static_bytes(
            shape,
            parallel,
            dp=groups.dp_size,
            stage=groups.pp_rank,
            train=True,
            reference=True,
            precision=precision,
            distributed=distributed,
        )
        longest = max(plan, key=lambda batch: len(batch.ids_T))
        lengths = [b - a for a, b in zip(longest.bounds, longest.bounds[1:], strict=False)]
        activations = memory.activation_bytes(
            shape,
            parallel,
            tokens=len(longest.ids_T),
            stage=groups.pp_rank,
            num_micro_batches=len(plan),
            precision=precision,
            padding=memory.bucket_padding(lengths),
        )
        buffers = [b for chunk in learner.model for b in chunk.buffers]
        measured = {
            "weights": _bytes(learner.parameters()),
            "gradients": _bytes([b.grad_data for b in buffers]),
            "optimizer": _optimizer_bytes(learner),
            "reference": _bytes(learner._reference or []),
            "activations": held.most,
        }
        expected = {
            "weights": counted.weights,
            "gradients": counted.gradients,
            "optimizer": counted.optimizer,
            "reference": counted.reference,
            "activations": activations,
        }
        found[role] = (measured, expected)
    dist.barrier()
    return found


def _bytes(tensors: Any) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _optimizer_bytes(learner: Any) -> int:
    """Adam's moments and, in bf16, the fp32 weights that it moves."""
    import torch

    inner = (
        learner.optimizer.chained_optimizers
        if hasattr(learner.optimizer, "chained_optimizers")
        else [learner.optimizer]
    )
    weights = {p.untyped_storage().data_ptr() for p in learner.parameters()}
    tensors: list[torch.Tensor] = []
    for part in inner:
        for group in part.optimizer.param_groups:
            tensors += [p for p in group["params"] if p.untyped_storage().data_ptr() not in weights]
        for state in part.optimizer.state.values():
            tensors += [v for v in state.values() if torch.is_tensor(v) and v.dim()]
    return _bytes(tensors)


CASES = [
    ({}, 1, "fp32", True),
    ({}, 1, "fp32", False),
    ({}, 1, "bf16", True),
    ({"recompute": "full"}, 1, "fp32", True),
    ({}, 2, "fp32", True),
    ({"tp": 2}, 2, "fp32", True),
    ({"tp": 2, "sequence_parallel": True}, 2, "fp32", True),
    ({"pp": 2}, 2, "fp32", True),
    ({"pp": 2, "vpp": 2}, 2, "fp32", True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "world", "precision", "distributed"), CASES)
def test_bytes_are_those_of_the_tensors(
    layout: dict[str, Any], world: int, precision: str, distributed: bool
) -> None:
    ranks = Job(world, measure, layout, precision, distributed).wait(150.0)
    for rank, roles in enumerate(ranks):
        for role, (measured, expected) in roles.items():
            for kind, share in (("weights", 0.02), ("gradients", 0.02), ("optimizer", 0.02),
                                ("reference", 0.02), ("activations", 0.1)):  # fmt: skip
                assert expected[kind] == pytest.approx(measured[kind], rel=share), (
                    f"rank {rank} {role} {kind}: planned {expected[kind]:,}, there are "
                    f"{measured[kind]:,} bytes"
                )


def test_fp8_keeps_its_weights_in_bf16() -> None:
    """Megatron's FP8 recipes hold bf16 parameters and cast them inside each layer."""
    shape = Shape.of(ModelConfig(), 320)
    held = [
        static_bytes(
            shape,
            ParallelConfig(),
            dp=2,
            stage=0,
            train=True,
            reference=True,
            precision=precision,
            distributed=True,
        )
        for precision in ("bf16", "fp8_tensorwise", "fp8_blockwise", "mxfp8")
    ]
    assert held == held[:1] * 4

"""Process groups: one `ProcessGroupCollection` per role, so that actor and critic may be split
differently.

Megatron-Core builds groups into module globals of `parallel_state`. Each role's groups are built
there in turn and taken out; `Groups.activate` puts a role's own back before that role runs, for
the few reads inside Megatron-Core that still go through the globals. Nothing else in this project
reads them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_binac.config import ParallelConfig
from megatron_binac.models import cpu, precision


def start_distributed() -> None:
    """Join the job's process group: nccl with a GPU, gloo without; alone where no launcher set one
    up."""
    cpu.enable()
    precision.refuse_wrong_apex()
    if dist.is_initialized():
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def _globals() -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(parallel_state).items()
        if name.startswith("_") and name[1:2].isupper()
    }


_PRISTINE = _globals()
"""The globals before any group was made; `build_groups` starts every role from them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """The process groups of one role and this rank's place in them."""

    role: str
    config: ParallelConfig
    collection: ProcessGroupCollection
    state: dict[str, Any]

    @property
    def tp_rank(self) -> int:
        return self.collection.tp.rank()

    @property
    def pp_rank(self) -> int:
        return self.collection.pp.rank()

    @property
    def dp_rank(self) -> int:
        return self.collection.dp.rank()

    @property
    def dp_size(self) -> int:
        return self.collection.dp.size()

    @property
    def replica_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.config.tp * self.config.pp

    @property
    def replica_rank(self) -> int:
        """Place among them."""
        return self.pp_rank * self.config.tp + self.tp_rank

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.config.pp - 1

    @property
    def reports(self) -> bool:
        """True on the ranks whose sums count once each: last pipeline stage, first tensor rank."""
        return self.is_last_stage and self.tp_rank == 0

    def activate(self) -> None:
        """Make this role's groups the ones that Megatron-Core's globals name."""
        for name, value in self.state.items():
            setattr(parallel_state, name, value)


def build_groups(role: str, config: ParallelConfig, seed: int) -> Groups:
    """Create the groups of one role over all ranks of the job; collective, in the same order on
    every rank."""
    config_ranks = config.tp * config.pp
    world = dist.get_world_size()
    if world % config_ranks:
        raise ValueError(
            f"{role}.parallel.tp * pp = {config_ranks} does not divide the {world} ranks of the "
            f"job; "
            f"change {role}.parallel or --nproc"
        )
    collection, state = _groups_of_layout(config)
    with cpu.region():
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return Groups(role=role, config=config, collection=collection, state=state)


_Layout = tuple[ProcessGroupCollection, dict[str, Any]]
_built: dict[tuple[int, ...], _Layout] = {}
_built_for: Any = None
"""The job's process group that `_built` is of; another one starts afresh."""


def _groups_of_layout(config: ParallelConfig) -> _Layout:
    """Process groups of a layout, made once: roles that are split alike share them.

    A layout has some twenty groups, and each is three threads under gloo or a communicator with
    buffers of its own under NCCL. Roles never talk at the same time, so that one set does.
    """
    global _built_for
    if _built_for is not dist.group.WORLD:
        _built.clear()
        _built_for = dist.group.WORLD
    key = (config.tp, config.pp, config.vpp, config.ep)
    for name, value in (_built[key][1] if key in _built else _PRISTINE).items():
        setattr(parallel_state, name, value)
    if key not in _built:
        with cpu.region():
            parallel_state.initialize_model_parallel(
                tensor_model_parallel_size=config.tp,
                pipeline_model_parallel_size=config.pp,
                virtual_pipeline_model_parallel_size=config.vpp if config.vpp > 1 else None,
                expert_model_parallel_size=config.ep,
                expert_tensor_parallel_size=config.tp // config.ep,
            )
            _built[key] = (ProcessGroupCollection.use_mpu_process_groups(), _globals())
    return _built[key]

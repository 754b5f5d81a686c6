"""Memory of the roles that are not training, kept in host memory until it is needed.

A role's tensors live in a few storages that many views share (Megatron-Core's buffers, the shards
of its optimizer). A storage is emptied in place and filled again later, so that every view of it
stays what it was. On the CPU host and device are the same memory: nothing is saved, the way there
and back is the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from megatron_binac.models.learner import MegatronLearner

Part = Literal["weights", "gradients", "optimizer", "reference"]
PARTS: tuple[Part, ...] = ("weights", "gradients", "optimizer", "reference")
"""Gradients are not kept: they are zero before every step."""


def tensors(learner: MegatronLearner) -> dict[Part, list[Tensor]]:
    """What a role holds on its device; a tensor that two parts share is in the first."""
    found: dict[Part, list[Tensor]] = {part: [] for part in PARTS}
    for chunk in learner.model:
        found["weights"] += [p.data for p in chunk.parameters()]
        if not isinstance(chunk, DistributedDataParallel):
            continue
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            if buffer.param_data is not None:
                found["weights"].append(buffer.param_data)
            found["gradients"].append(buffer.grad_data)
    if learner.optimizer is not None:
        for part in getattr(learner.optimizer, "chained_optimizers", [learner.optimizer]):
            for group in part.optimizer.param_groups:
                found["optimizer"] += [p.data for p in group["params"]]
            for state in part.optimizer.state.values():
                found["optimizer"] += [v for v in state.values() if isinstance(v, Tensor)]
    found["reference"] += learner._reference or []
    return found


def account(learner: MegatronLearner) -> dict[Part, int]:
    """Bytes of each part on this rank."""
    return {part: sum(s.nbytes() for s in held) for part, held in _storages(learner).items()}


def _storages(learner: MegatronLearner) -> dict[Part, list[torch.UntypedStorage]]:
    seen: set[int] = set()
    found: dict[Part, list[torch.UntypedStorage]] = {}
    for part, held in tensors(learner).items():
        found[part] = []
        for tensor in held:
            storage = tensor.untyped_storage()
            # By object: an emptied storage has no address.
            if storage._cdata not in seen and tensor.numel():
                seen.add(storage._cdata)
                found[part].append(storage)
    return found


class Offload:
    """Which parts of which role are on the device.

    Between two calls all weights are there (engines may sample from them) and all else is in host
    memory. `training` makes one role whole and takes the weights of the others away.
    """

    def __init__(
        self, learners: Mapping[str, MegatronLearner], engines: Sequence[Any] = ()
    ) -> None:
        self._learners = dict(learners)
        self._engines = engines
        self._storages: dict[str, dict[Part, list[torch.UntypedStorage]]] = {}
        self._away: dict[int, tuple[int, Tensor | None]] = {}
        self.bytes_moved = 0
        """Since the start, to the host and back."""
        for role in self._learners:
            self._move(role, ("gradients", "optimizer", "reference"), away=True)

    @contextlib.contextmanager
    def training(self, role: str) -> Iterator[None]:
        """All of one role on the device, and of the others nothing."""
        for engine in self._engines:
            engine.rest()
        others = [name for name in self._learners if name != role]
        for name in others:
            self._move(name, ("weights",), away=True)
        self._move(role, PARTS, away=False)
        try:
            yield
        finally:
            self._move(role, ("gradients", "optimizer", "reference"), away=True)
            for name in others:
                self._move(name, ("weights",), away=False)

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Everything on the device, for checkpoints."""
        for role in self._learners:
            self._move(role, PARTS, away=False)
        try:
            yield
        finally:
            for role in self._learners:
                self._move(role, ("gradients", "optimizer", "reference"), away=True)

    def on_device(self, role: str) -> dict[Part, int]:
        """Bytes of each part that are on the device now."""
        return {
            part: sum(s.nbytes() for s in held) for part, held in self._storages[role].items()
        }

    def _move(self, role: str, parts: Iterable[Part], *, away: bool) -> None:
        if away or role not in self._storages:
            # An optimizer makes its state at the first step: look again each time.
            self._storages[role] = _storages(self._learners[role])
        for part in parts:
            for storage in self._storages[role][part]:
                if away:
                    self._put_away(storage, keep=part != "gradients")
                else:
                    self._bring_back(storage)

    def _put_away(self, storage: torch.UntypedStorage, *, keep: bool) -> None:
        if storage._cdata in self._away or not storage.nbytes():
            return
        size, copy = storage.nbytes(), None
        if keep:
            copy = torch.empty(size, dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
            copy.copy_(_bytes(storage))
            self.bytes_moved += size
        storage.resize_(0)
        self._away[storage._cdata] = (size, copy)

    def _bring_back(self, storage: torch.UntypedStorage) -> None:
        size, copy = self._away.pop(storage._cdata, (0, None))
        if not size:
            return
        storage.resize_(size)
        if copy is None:
            _bytes(storage).zero_()
        else:
            _bytes(storage).copy_(copy)
            self.bytes_moved += size


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class TakesTurns:
    """A learner that is whole on its device only while it learns."""

    def __init__(self, learner: MegatronLearner, offload: Offload) -> None:
        self._learner, self._offload = learner, offload

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def learn(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """See `MegatronLearner.learn`."""
        with self._offload.training(self._learner.role):
            return self._learner.learn(*args, **kwargs)

    def update(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """See `MegatronLearner.update`."""
        with self._offload.training(self._learner.role):
            return self._learner.update(*args, **kwargs)

    def logprobs(self, *args: Any, reference: bool = False, **kwargs: Any) -> Any:
        """See `MegatronLearner.logprobs`; the reference has to be fetched."""
        if not reference:
            return self._learner.logprobs(*args, **kwargs)
        with self._offload.training(self._learner.role):
            return self._learner.logprobs(*args, reference=True, **kwargs)

"""Checkpoints of both roles by Megatron's distributed checkpointing, under any layout, put in
place in one move.

A checkpoint is written to a folder with another name, hashed into a manifest, flushed, and renamed:
what is called `step_000010` is complete. The file `latest`, which names it, moves last; what is
dropped goes after that. Before a checkpoint is read it is checked against its manifest; a damaged
one is named and the one before it is used (`newest_good`). `state.json` holds what is not a tensor.
There is no random state to keep: every random number of a run comes from a seed, a step and a name
(`megatron_binac.seeds`). That also holds for the trees of a step that a kill interrupts: the cursor
is saved before they are grown, so that a resumed run grows the same ones again, once.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from megatron_binac.first_rank import on_first
from megatron_binac.models import cpu, manifest, pickles
from megatron_binac.models.learner import MegatronLearner

logger = logging.getLogger(__name__)

FIRST = "step_000000"
"""The weights before the first step: the frozen reference, kept for the whole run."""

LATEST = "latest"
"""File beside the checkpoints that names the newest one."""

HEADERS = 8192
"""Bytes on the disk beside the numbers of one parameter and its optimizer state."""

WRITE_ERRORS = ("PytorchStreamWriter", "inline_container", "iostream error")
"""Signs of a torch.save that could not write; it does not say why."""

PROBE_BYTES = 65536
"""Of the file that is tried after such a failure. Little: a disk that is not full has to take it;
and more than a disk has left after a file that stopped for want of room."""


def step_name(step: int) -> str:
    """Folder name of the checkpoint from which `step` comes next."""
    return f"step_{step:06d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """Which checkpoints stay: the first always does."""

    newest: int
    best: int = 0
    """The ones with the highest scores, beside the newest."""


@dataclass(kw_only=True, slots=True)
class Background:
    """Writes one checkpoint at a time beside the training, with Megatron-Core's requests.

    A copy of the tensors is taken in `save`; `settle` puts the checkpoint in place once every rank
    has written its part. What a kill interrupts is a draft: the checkpoint before it stays the
    newest.
    """

    _pending: _Pending | None = None

    def settle(self, *, wait: bool = False) -> None:
        """Seal what is being written if all ranks are done with it, or `wait` for them; collective.

        Raises OSError where the disk failed.
        """
        pending = self._pending
        if pending is None:
            return
        if not wait:
            busy = torch.tensor(int(pending.thread.is_alive()), device=cpu.device())
            dist.all_reduce(busy, op=dist.ReduceOp.MAX)
            if int(busy):
                return
        pending.thread.join()
        self._pending = None
        pending.job.finish(pending.requests, pending.digests, pending.problem)


@dataclass(kw_only=True, slots=True)
class _Pending:
    job: _Job
    thread: threading.Thread
    requests: list[Any]
    digests: dict[str, manifest.Digest] = field(default_factory=dict)
    problem: OSError | None = None


def save(
    folder: Path,
    step: int,
    learners: Mapping[str, MegatronLearner],
    state: Mapping[str, Any],
    keep: int,
    *,
    keep_best: int = 0,
    score: float | None = None,
    background: Background | None = None,
) -> Path:
    """Write the checkpoint of `step` under `folder` and drop all but the newest `keep`, the first,
    and the `keep_best` with the highest scores; collective.

    With `background` the disk is written beside the training and the checkpoint is there after a
    later `settle`. Raises OSError where the disk failed, on every rank that can be told; what was
    there before is untouched.
    """
    if background is not None:
        background.settle(wait=True)
    kept = Kept(newest=keep, best=keep_best)
    job = _Job(folder=folder, step=step, score=score, kept=kept)
    num_bytes = _num_bytes(learners)
    first = dist.get_rank() == 0
    _together(lambda: _begin(job.draft, num_bytes) if first else None, job.target)
    job.meta = {
        **state,
        "step": step,
        "learners": {role: _light_state(learner) for role, learner in learners.items()},
    }
    try:
        requests = _write(job, learners, background)
        if background is None:
            job.seal({})
        else:
            background._pending = _start(job, requests)
    except OSError:
        if first:
            shutil.rmtree(job.draft, ignore_errors=True)
        raise
    return job.target


@dataclass(kw_only=True, slots=True)
class _Job:
    """One checkpoint on its way."""

    folder: Path
    step: int
    score: float | None
    kept: Kept
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> Path:
        return self.folder / step_name(self.step)

    @property
    def draft(self) -> Path:
        return self.folder / f".{self.target.name}.draft"

    def finish(
        self, requests: list[Any], digests: dict[str, manifest.Digest], problem: OSError | None
    ) -> None:
        """Let Megatron-Core close what was written in the background, and seal; collective."""
        try:
            _raise_together(problem, self.target)
            with _disk_errors(self.target), cpu.region():
                for request in requests:
                    for close in request.finalize_fns:
                        close()
            self.seal(digests)
        except OSError:
            if dist.get_rank() == 0:
                shutil.rmtree(self.draft, ignore_errors=True)
            raise

    def seal(self, digests: dict[str, manifest.Digest]) -> None:
        """Hash what is not hashed yet, write the manifest, rename, move `latest`, drop the old;
        collective."""
        first = dist.get_rank() == 0

        def write_and_hash() -> None:
            if first:
                (self.draft / "state.json").write_text(json.dumps(self.meta), encoding="utf-8")
            hash_own(self.draft, digests)

        _together(write_and_hash, self.target)
        shares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shares, digests)
        found = {name: digest for share in shares for name, digest in share.items()}
        facts = {"step": self.step, "score": self.score}
        _together(lambda: _seal(self, found, facts) if first else None, self.target)
        if first:
            _prune(self.folder, self.kept)


def hash_own(draft: Path, digests: dict[str, manifest.Digest]) -> None:
    """Add the hashes of the files that this rank wrote; the first rank's are also all that have no
    rank in their name."""
    rank = dist.get_rank()
    for name in manifest.files(draft):
        writer = re.match(r"__(\d+)_", Path(name).name)
        if name not in digests and rank == (int(writer[1]) if writer else 0):
            digests[name] = manifest.digest(draft / name, flush=True)


def newest_good(folder: Path, *, set_aside: bool) -> Path | None:
    """The newest checkpoint whose every file is what was written; None where there is none.

    Damaged ones are logged in one line each and, with `set_aside`, renamed to `step_N.damaged`.
    Collective: the ranks share the reading.
    """
    for name in on_first(lambda: _complete(folder)):
        reason = damage(folder / name)
        if reason is None:
            if set_aside and dist.get_rank() == 0:
                point_latest(folder / name)
            return folder / name
        if dist.get_rank() == 0:
            logger.warning(
                f"checkpoint {folder / name} is damaged: {reason}; it is not used"
                + (f" and is called {name}.damaged now" if set_aside else "")
                + ", the one before it is tried"
            )
            if set_aside:
                shutil.rmtree(folder / f"{name}.damaged", ignore_errors=True)
                (folder / name).rename(folder / f"{name}.damaged")
        dist.barrier()
    return None


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files, in one line; None where they are what was written.
    Collective."""
    problem = None
    try:
        listed = manifest.read(path)["files"]
        mine = sorted(listed)[dist.get_rank() :: dist.get_world_size()]
        problem = manifest.damage(path, mine, listed)
    except (OSError, ValueError) as error:
        problem = str(error)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, problem)
    return next((text for text in found if text is not None), None)


def _complete(folder: Path) -> list[str]:
    """Names of the checkpoints in `folder`, newest first."""
    steps = [p.name for p in folder.glob("step_*") if re.fullmatch(r"step_\d+", p.name)]
    return sorted(steps, key=lambda name: int(name[5:]), reverse=True)


def load(path: Path, learners: Mapping[str, MegatronLearner]) -> dict[str, Any]:
    """Put weights, optimizers and schedules back; returns the state that was saved beside them.
    Collective."""
    state = json.loads((path / "state.json").read_text(encoding="utf-8"))
    for role, learner in learners.items():
        load_learner(path / role, learner)
        learner.num_updates = state["learners"][role]["num_updates"]
        if learner.scheduler is not None:
            learner.scheduler.num_steps = 0  # it adds what it loads to where it stands
            learner.scheduler.load_state_dict(state["learners"][role]["scheduler"])
    return state


def save_learner(path: Path, learner: MegatronLearner, *, with_optimizer: bool = True) -> None:
    """Write one role's weights (and optimizer, where it has one) to the new folder `path`;
    collective."""
    _save_learner(path, learner, with_optimizer=with_optimizer, later=False)


def _save_learner(
    path: Path, learner: MegatronLearner, *, with_optimizer: bool, later: bool
) -> Any:
    """Write one role, or prepare to: with `later`, Megatron-Core's request comes back."""
    learner.groups.activate()
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
    dist.barrier()
    extra: dict[str, Any] = {"async_sharded_save": True} if later else {}
    if later and "async_strategy" in inspect.signature(dist_checkpointing.save).parameters:
        extra["async_strategy"] = "mcore"  # the other one is a package of its own
    with cpu.region():
        state = _sharded(learner, with_optimizer=with_optimizer, loading=False)
        return dist_checkpointing.save(state, str(path), **extra)


def load_learner(path: Path, learner: MegatronLearner, *, weights_only: bool = False) -> None:
    """Read one role's weights (and optimizer) from `path`, saved under any layout; collective.

    Raises ValueError, before anything is read into the model, where reading it could run a program.
    """
    _check_pickles(path)
    learner.groups.activate()
    with_optimizer = learner.optimizer is not None and not weights_only
    with cpu.region():
        template = _sharded(learner, with_optimizer=with_optimizer, loading=True)
        names = [f"model{i}" for i in range(len(learner.chunks))]
        absent = _leave_out_states([template[name] for name in names], path)
        loaded = dist_checkpointing.load(template, str(path))
        for name, chunk, empty in zip(names, learner.chunks, absent, strict=True):
            chunk.load_state_dict({**loaded[name], **empty})
        if with_optimizer:
            if not learner.config.optimizer.distributed:
                _restore_zero_step(loaded["optimizer"])
            learner.optimizer.load_state_dict(loaded["optimizer"])
        elif learner.optimizer is not None:
            learner.optimizer.reload_model_params()


def _leave_out_states(templates: list[dict[str, Any]], path: Path) -> list[dict[str, None]]:
    """Take the extra states of layers that the checkpoint lacks out of what is to be read; what
    each layer is given instead, which is nothing.

    Transformer Engine keeps one for every norm and attention, local layers and converted weights
    have none there: they hold scales of FP8 from earlier steps, which no recipe here uses.
    """
    held = FileSystemReader(path).read_metadata().state_dict_metadata
    absent: list[dict[str, None]] = []
    for template in templates:
        names = [
            name
            for name, value in template.items()
            if isinstance(value, ShardedObject)
            and name.endswith("._extra_state")
            and value.unique_key not in held
        ]
        for name in names:
            del template[name]
        absent.append(dict.fromkeys(names))
    return absent


def _check_pickles(path: Path) -> None:
    """Raise ValueError on all ranks where the checkpoint could run a program; the first rank
    looks."""

    def look() -> None:
        try:
            pickles.check(path)
        except OSError as error:
            raise ValueError(str(error)) from error

    on_first(look)


def _sharded(learner: MegatronLearner, *, with_optimizer: bool, loading: bool) -> dict[str, Any]:
    metadata = {
        "dp_cp_group": learner.groups.collection.dp_cp,
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
    }
    state: dict[str, Any] = {
        f"model{i}": chunk.sharded_state_dict(metadata=metadata)
        for i, chunk in enumerate(learner.chunks)
    }
    if with_optimizer and learner.optimizer is not None:
        _fill_moments(learner.optimizer)
        state["optimizer"] = learner.optimizer.sharded_state_dict(
            state, is_loading=loading, metadata=metadata
        )
    return state


def _fill_moments(optimizer: Any) -> None:
    """Give an Adam that has not stepped yet the zeros that it would start from: empty state has no
    shape."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner = part.optimizer
        for group in inner.param_groups:
            for p in group["params"]:
                if not inner.state.get(p):
                    inner.state[p] = {
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }


def _restore_zero_step(state: dict[str, Any]) -> None:
    """Put back a step count of 0: Megatron-Core leaves it out of what it saves, and misses it."""
    adam = state.get("optimizer", state)  # a bf16 optimizer has its Adam inside
    adam["state"].setdefault("common_step", torch.zeros((), dtype=torch.float32))


def _light_state(learner: MegatronLearner) -> dict[str, Any]:
    scheduler = None if learner.scheduler is None else learner.scheduler.state_dict()
    return {"num_updates": learner.num_updates, "scheduler": scheduler}


def _num_bytes(learners: Mapping[str, MegatronLearner]) -> int:
    """About what a checkpoint takes on the disk."""
    num = 0
    for learner in learners.values():
        of_optimizer = 12 if learner.optimizer is not None else 0  # fp32 weight and two moments
        size = sum(
            p.numel() * (p.element_size() + of_optimizer) + HEADERS for p in learner.parameters()
        )
        num += size // learner.groups.dp_size
    total = torch.tensor(num, device=cpu.device())
    dist.all_reduce(total)
    return int(total)


def _begin(draft: Path, num_bytes: int) -> None:
    """Make the draft's folder where the disk has room for it: later only this rank may notice."""
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    free = shutil.disk_usage(draft).free
    if free < num_bytes:
        draft.rmdir()
        reason = f"{free / 2**20:.1f} MiB are free, about {num_bytes / 2**20:.1f} MiB are needed"
        raise OSError(errno.ENOSPC, reason)


def _write(
    job: _Job, learners: Mapping[str, MegatronLearner], background: Background | None
) -> list[Any]:
    """Let Megatron-Core write every role, or say how to. Raises OSError where the disk failed."""
    with _disk_errors(job.target):
        if background is None:
            for role, learner in learners.items():
                save_learner(job.draft / role, learner)
            return []
        return [
            _save_learner(job.draft / role, learner, with_optimizer=True, later=True)
            for role, learner in learners.items()
        ]


class _disk_errors:
    """Turns what Megatron-Core raises on a failed disk into one OSError; collective on its way
    out."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        reason = None
        if isinstance(error, OSError | RuntimeError):
            # Small files are written by one rank amid the collectives of all. The others cannot be
            # told: they end as this one does, when its connections close.
            if isinstance(error, RuntimeError) and not _of_the_disk(error):
                return
            known = error.errno if isinstance(error, OSError) else None
            number = known or _ask_the_disk(self.target.parent)
            raise _failure(self.target, OSError(number, str(error))) from error
        if isinstance(error, CheckpointException):  # on all ranks at once; one knows the reasons
            text = "; ".join(str(exception) for exception, _ in error.failures.values())
            found = re.search(r"\[Errno (\d+)\]", text)
            number = int(found[1]) if found else _ask_the_disk(self.target.parent)
            reason = OSError(number, text)
        elif error is not None:
            return
        _raise_together(reason, self.target)


def _ask_the_disk(folder: Path) -> int:
    """What the disk answers to a small file now, for a failure that did not say; EIO where the
    file is written."""
    probe = folder / f".probe_{dist.get_rank()}.draft"
    try:
        with open(probe, "wb") as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.errno or errno.EIO
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return errno.EIO


def _of_the_disk(error: RuntimeError) -> bool:
    return any(sign in str(error) for sign in WRITE_ERRORS)


def _start(job: _Job, requests: list[Any]) -> _Pending:
    """Copy the tensors of the requests and write them in a thread of this rank."""
    calls = []
    for request in requests:
        arguments = list(request.async_fn_args)
        if request.preload_fn is not None:
            arguments[1] = _staged(request.preload_fn())
        if request.async_fn is not None:
            calls.append((request.async_fn, arguments, request.async_fn_kwargs))
    pending: _Pending

    def write() -> None:
        try:
            for function, arguments, options in calls:
                function(*arguments, **options)
            if calls and dist.get_rank() != 0:  # the first rank has small files to come
                hash_own(job.draft, pending.digests)
        except OSError as error:
            pending.problem = error

    thread = threading.Thread(target=write, name=f"save {job.target.name}")
    pending = _Pending(job=job, thread=thread, requests=requests)
    thread.start()
    return pending


def _staged(buckets: list[Any]) -> list[Any]:
    """Megatron-Core's write buckets with tensors of their own: on the CPU it hands out live
    ones."""
    if torch.cuda.is_available():
        return buckets
    return [
        (path, key, (blobs, [(item, tensor.clone()) for item, tensor in tensors]))
        for path, key, (blobs, tensors) in buckets
    ]


def _seal(job: _Job, digests: Mapping[str, manifest.Digest], facts: Mapping[str, Any]) -> None:
    manifest.write(job.draft, digests, facts)
    if job.target.exists():
        _discard(job.target)
    os.replace(job.draft, job.target)
    manifest.flush_folder(job.folder)
    point_latest(job.target)


def point_latest(target: Path) -> None:
    """Let the file `latest` name this checkpoint: the last step of a save, in one move."""
    draft = target.parent / ".latest.draft"
    with open(draft, "w", encoding="ascii") as file:
        file.write(target.name + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, target.parent / LATEST)
    manifest.flush_folder(target.parent)


def drop_old(folder: Path, keep: int, keep_best: int = 0) -> None:
    """Delete what a kill amid a `save` has left: drafts, and checkpoints beyond those it keeps."""
    for draft in folder.glob(".*.draft"):
        shutil.rmtree(draft, ignore_errors=True)
    _prune(folder, Kept(newest=keep, best=keep_best))


def _prune(folder: Path, kept: Kept) -> None:
    steps = [name for name in _complete(folder) if name != FIRST]
    scores = {name: score for name in steps if (score := _score(folder / name)) is not None}
    best = sorted(scores, key=lambda name: (scores[name], name), reverse=True)[: kept.best]
    for name in steps[kept.newest :]:
        if name not in best:
            _discard(folder / name)


def _score(path: Path) -> float | None:
    """The held-out score that a checkpoint was saved with; None where it has none that can be
    read."""
    try:
        return manifest.read(path)["facts"]["score"]
    except ValueError:
        return None


def _discard(path: Path) -> None:
    """Delete a checkpoint; a kill amid it leaves a draft behind and no half of a checkpoint."""
    doomed = path.with_name(f".{path.name}.old.draft")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _together(action: Callable[[], None], target: Path) -> None:
    """Run `action`, which calls no other rank; OSError on all ranks where it failed on any."""
    problem = None
    try:
        action()
    except OSError as error:
        problem = error
    _raise_together(problem, target)


def _raise_together(problem: OSError | None, target: Path) -> None:
    facts = None if problem is None else (problem.errno, problem.strerror or str(problem))
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, facts)
    told = [facts for facts in found if facts is not None]
    if told:
        # The one that names its reason, where several ranks failed.
        raise _failure(target, OSError(*max(told, key=lambda facts: len(facts[1]))))


def _failure(target: Path, error: OSError) -> OSError:
    reason = error.strerror or str(error)
    advice = "see to the disk"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        reason, advice = f"the disk is full ({reason})", "free some space"
    return OSError(
        error.errno,
        f"checkpoint {target} could not be written: {reason}; {advice} and go on with "
        f"binac train --resume {target.parent.parent}: older checkpoints are whole",
    )

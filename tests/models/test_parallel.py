"""Process groups: one set a layout, however many roles and learners ask for it."""

from __future__ import annotations

import os

import pytest

from megatron_binac.config import ParallelConfig
from megatron_binac.models.parallel import build_groups, start_distributed


def test_roles_of_one_layout_share_their_groups() -> None:
    """Under gloo a group is three threads: a second role must not bring any."""
    start_distributed()
    actor = build_groups("actor", ParallelConfig(), 1)
    before = len(os.listdir("/proc/self/task"))
    critic = build_groups("critic", ParallelConfig(), 2)
    assert len(os.listdir("/proc/self/task")) == before
    assert critic.collection is actor.collection
    assert (actor.role, critic.role) == ("actor", "critic")


def test_a_layout_that_does_not_divide_the_job_is_refused() -> None:
    start_distributed()
    with pytest.raises(ValueError, match=r"critic\.parallel\.tp \* pp = 2 does not divide the 1"):
        build_groups("critic", ParallelConfig(tp=2), 1)

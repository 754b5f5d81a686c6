"""What one rank does for all: read a file, ask a server, look whether something is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

Found = TypeVar("Found")


def on_first(action: Callable[[], Found]) -> Found:
    """Run `action` on the first rank; what it returned, or the exception that it raised, on all.

    Collective where there is a process group; what comes back must be picklable.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return action()
    found: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            found[0] = action()
        except Exception as error:  # the others wait here: they have to hear of it
            found[1] = error
    dist.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise found[1]
    return found[0]

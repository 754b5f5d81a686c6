"""What one rank does for all, and what the others hear of it."""

from __future__ import annotations

import pytest
from helpers_ranks import run_ranks

from megatron_binac.first_rank import on_first


def asked() -> tuple[int, str, int]:
    """On each rank: what the first found, what it raised, and how often this rank looked."""
    import torch.distributed as dist

    from megatron_binac.models.parallel import start_distributed

    start_distributed()
    looks: list[int] = []

    def look() -> int:
        looks.append(dist.get_rank())
        return 7 + dist.get_rank()

    def breaks() -> int:
        raise ValueError(f"rank {dist.get_rank()} broke")

    found = on_first(look)
    with pytest.raises(ValueError, match="broke") as error:
        on_first(breaks)
    return found, str(error.value), len(looks)


def test_every_rank_hears_what_the_first_found_and_raised() -> None:
    assert run_ranks(2, asked) == [(7, "rank 0 broke", 1), (7, "rank 0 broke", 0)]


def test_without_ranks_it_is_a_call() -> None:
    assert on_first(lambda: "here") == "here"

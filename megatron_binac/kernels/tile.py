"""How a Triton kernel is launched, and whether it is interpreted. Imports Triton."""

from __future__ import annotations

import os
from dataclasses import dataclass

import triton
import triton.language as tl

INTERPRET = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
    """Launch configuration of one kernel.

    Example: ``Tile(blocks={"BT": 128, "BV": 128, "BH": 64}, num_warps=8, num_stages=3)``
    """

    blocks: dict[str, int]
    """Compile-time block sizes by the names of the kernel's arguments."""
    num_warps: int
    num_stages: int = 1

    def fit(self, **sizes: int) -> Tile:
        """Under the interpreter, blocks no larger than the problem; a GPU's blocks are fixed."""
        if not INTERPRET:
            return self
        blocks = {
            name: min(block, max(32, triton.next_power_of_2(sizes.get(name, block))))
            for name, block in self.blocks.items()
        }
        return Tile(blocks=blocks, num_warps=self.num_warps, num_stages=self.num_stages)

"""Random numbers that depend on names and counters, never on the order in which things run."""

from __future__ import annotations

import hashlib

import numpy as np


def name_seed(*parts: object) -> int:
    """A 63-bit seed from a path of names and numbers, the same on every machine and layout."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def uniforms(seeds_B: np.ndarray, counter: int) -> np.ndarray:
    """One number in [0, 1) for each (seed, counter): float64 [B], the same in any batch.

    SplitMix64 of Steele, Lea and Flood (OOPSLA 2014), as a counter-based generator.
    """
    with np.errstate(over="ignore"):
        x = seeds_B.astype(np.uint64) + np.uint64(counter + 1) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53

"""Keys and values while a role samples: of the prompts, of the answers, and held for the next call.

Prompts are read as a tree: a token that several of them begin with is read once, and one whose keys
and values are held from an earlier call under the same weights is not read again.

Shapes: D distinct tokens of the prompts, U of them that are read now, B sequences, C tokens of the
longest, K key-value heads, H head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from megatron_binac import packing
from megatron_binac.models.prefix_batches import PrefixBatches, take_rows

Pair = tuple[Tensor, Tensor]


class KVCache:
    """One pair of tensors a layer: of the prompts' tokens, [D, K, H], and from `lay_out` on of the
    sequences, [B, C, K, H]."""

    def __init__(self, past: dict[int, Pair] | None = None, places_D: Tensor | None = None) -> None:
        """`past` has keys and values of tokens that are not read now; `places_D` says where those
        of each distinct token lie behind the ones that are, end to end."""
        self.layers: dict[int, Pair] = {}
        self._past, self._places_D = past, places_D

    def hold(self, layer: int, key_UKH: Tensor, value_UKH: Tensor) -> Pair:
        """Keys and values of all distinct tokens, [D, K, H]."""
        pair = (key_UKH, value_UKH)
        if self._past is not None:
            assert self._places_D is not None
            now, before = pair, self._past[layer]
            pair = (
                torch.cat([now[0], before[0]]).index_select(0, self._places_D),
                torch.cat([now[1], before[1]]).index_select(0, self._places_D),
            )
        self.layers[layer] = pair
        return pair

    def lay_out(self, slots_BC: Tensor) -> None:
        """Give each sequence a row of its own; what lies behind its prompt is overwritten."""
        self.layers = {
            n: (take_rows(k, slots_BC), take_rows(v, slots_BC)) for n, (k, v) in self.layers.items()
        }

    def write(
        self, layer: int, rows_B: Tensor, positions_B: Tensor, key_BKH: Tensor, value_BKH: Tensor
    ) -> None:
        """Store one key and value a sequence."""
        key, value = self.layers[layer]
        key[rows_B, positions_B] = key_BKH
        value[rows_B, positions_B] = value_BKH

    def select(self, rows_B: Tensor) -> None:
        """Keep these rows, in this order."""
        self.layers = {
            n: (k.index_select(0, rows_B), v.index_select(0, rows_B))
            for n, (k, v) in self.layers.items()
        }


class HeldRows:
    """Sequences whose keys and values are still there under the weights that answer now: each
    prompt's tokens once, and what was sampled but for the last token, which was never read."""

    def __init__(self, prompts: dict[int, Pair]) -> None:
        self._parts: dict[int, tuple[list[Tensor], list[Tensor]]] = {
            layer: ([key], [value]) for layer, (key, value) in prompts.items()
        }
        self._size = len(next(iter(prompts.values()))[0]) if prompts else 0
        self._ids: list[np.ndarray] = []
        self._places: list[np.ndarray] = []

    def add(
        self,
        cache: KVCache,
        rows: np.ndarray,
        ids: Sequence[np.ndarray],
        prompt_slots: Sequence[np.ndarray],
    ) -> None:
        """Take rows of a cache; `ids` are prompt and answer of each without the last token."""
        begins = np.asarray([len(slots) for slots in prompt_slots])
        sampled = np.asarray([len(row) for row in ids]) - begins
        total = int(sampled.sum())
        ends = np.cumsum(sampled)
        within = np.arange(total) - np.repeat(ends - sampled, sampled)
        row_N = torch.as_tensor(np.repeat(rows, sampled))
        position_N = torch.as_tensor(np.repeat(begins, sampled) + within)
        for layer, (key, value) in cache.layers.items():
            keys, values = self._parts[layer]
            keys.append(key[row_N, position_N])
            values.append(value[row_N, position_N])
        for row, slots, end, num in zip(ids, prompt_slots, ends, sampled, strict=True):
            own = np.arange(self._size + end - num, self._size + end)
            self._ids.append(row)
            self._places.append(np.concatenate([slots, own]))
        self._size += total

    def __len__(self) -> int:
        return len(self._ids)

    def match(self, prompts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """For each prompt, where the keys and values of its first tokens lie: of as many as any
        row here begins with, and of all but the last, whose output is asked for."""
        rows, lengths = packing.match_prefixes(prompts, self._ids)
        return [
            self._places[row][: min(length, len(prompt) - 1)]
            for row, length, prompt in zip(rows.tolist(), lengths.tolist(), prompts, strict=True)
        ]

    def take(self, places_N: Tensor) -> dict[int, Pair]:
        """Keys and values of these places, [N, K, H] a layer."""
        for keys, values in self._parts.values():
            keys[:], values[:] = [torch.cat(keys)], [torch.cat(values)]
        return {
            layer: (keys[0].index_select(0, places_N), values[0].index_select(0, places_N))
            for layer, (keys, values) in self._parts.items()
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptTree:
    """Different prompts as one row, every distinct token once."""

    ids_U: np.ndarray
    positions_U: np.ndarray
    batches: PrefixBatches
    slots: list[np.ndarray]
    """For each prompt, the slots [L] of its tokens among the D."""
    last_P: np.ndarray
    """Row of each prompt's last token among the U."""
    cache: KVCache

    @classmethod
    def of(
        cls,
        prompts: Sequence[np.ndarray],
        held: HeldRows | None,
        *,
        multiple: int,
        device: torch.device,
    ) -> PromptTree:
        """The tree of some prompts; `multiple` divides the number of tokens that are read."""
        packed = packing.gather(
            packing.Ragged.from_rows(prompts, np.int32), np.arange(len(prompts), dtype=np.int32)
        )
        layout = packing.share_prefixes(
            packed, alignment=packing.Alignment(pack_multiple=multiple)
        )
        bounds = packed.cu_seqlens
        slots = [layout.slots_T[a:b] for a, b in pairwise(bounds)]
        place_D = np.full(len(layout.tokens_D), -1)
        if held is not None and len(held):
            for own, places in zip(slots, held.match(prompts), strict=True):
                place_D[own[: len(places)]] = places
        known = np.flatnonzero(place_D >= 0)
        known = known[: len(known) // multiple * multiple]
        fresh_U = np.setdiff1d(np.arange(len(place_D)), known)
        row_D = np.empty_like(place_D)
        row_D[fresh_U], row_D[known] = np.arange(len(fresh_U)), len(fresh_U) + np.arange(len(known))
        cache = KVCache()
        if len(known):
            assert held is not None
            put = lambda array: torch.as_tensor(array, device=device)  # noqa: E731
            cache = KVCache(held.take(put(place_D[known])), put(row_D))
        return cls(
            ids_U=layout.tokens_D[fresh_U],
            positions_U=layout.position_ids_D[fresh_U],
            batches=PrefixBatches.of(layout, device, fresh_U=fresh_U if len(known) else None),
            slots=slots,
            last_P=row_D[[own[-1] for own in slots]],
            cache=cache,
        )

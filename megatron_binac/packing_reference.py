"""Plain Python twin of csrc/: the same functions with the same results bit for bit, only slower.

`megatron_binac.packing` checks every argument before it calls either twin. Inside, integers decide
everything (costs are quantised once) and every tie is broken by index, so that a plan does not
depend on which twin made it, nor on the machine.

Suffixes: S sequences, U units (sequences that stay together), B micro-batches, T stored tokens,
D distinct tokens, N segments of a prefix forest.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

import numpy as np

SMALL = 2**17
"""Units times sets up to which plain largest differencing, quadratic in both, is tried as well."""

BIN_SEARCH = 128
"""Partial fillings that are looked at to complete one bin."""


def align_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def quantise(costs_S: np.ndarray) -> list[int]:
    """Costs as integers of at least 1 whose sum stays below 2**63.

    The scale is a power of two taken from the largest cost and the count alone: a scale from the
    sum would depend on the order of summation.
    """
    largest = float(costs_S.max(initial=0.0))
    if largest == 0.0:
        return [1] * len(costs_S)
    _, exponent = math.frexp(largest)
    shift = 62 - exponent - len(costs_S).bit_length()
    return np.maximum(np.ldexp(costs_S, shift).astype(np.int64), 1).tolist()


def lower_bound(weights: Sequence[int], limit: int) -> int:
    """Bins that no packing can go below: the bound L2 of Martello and Toth, over every threshold.

    Args:
        weights: in descending order, each in [1, limit].
    """
    num = len(weights)
    prefix = [0] * (num + 1)
    for i, weight in enumerate(weights):
        prefix[i + 1] = prefix[i] + weight
    half = next((i for i, weight in enumerate(weights) if 2 * weight <= limit), num)

    # An item over half the limit takes a bin of its own. Those up to limit - threshold have room
    # left for items of at least the threshold; the rest of these need further bins.
    spare = half * limit - prefix[half]
    best = half + max(0, -(-(prefix[num] - prefix[half] - spare) // limit))
    closed = 0  # items too large to take anything of the threshold's size
    for i in range(num - 1, half - 1, -1):
        if i + 1 < num and weights[i] == weights[i + 1]:
            continue
        while closed < half and weights[closed] > limit - weights[i]:
            closed += 1
        spare = (half - closed) * limit - (prefix[half] - prefix[closed])
        small = prefix[i + 1] - prefix[half]
        best = max(best, half + max(0, -(-(small - spare) // limit)))
    return best


def best_fit_decreasing(
    order: Sequence[int], weights_U: Sequence[int], limit: int
) -> list[list[int]]:
    """Bins of units: each unit goes where it leaves the least room, else into a new bin."""
    bins: list[list[int]] = []
    rooms: list[int] = []  # distinct rooms in ascending order
    bins_with_room: dict[int, list[int]] = {}

    def put_back(index: int, room: int) -> None:
        if room not in bins_with_room:
            bins_with_room[room] = []
            insort(rooms, room)
        bins_with_room[room].append(index)

    for unit in order:
        weight = weights_U[unit]
        at = bisect_left(rooms, weight)
        if at == len(rooms):
            bins.append([unit])
            put_back(len(bins) - 1, limit - weight)
            continue
        room = rooms[at]
        index = bins_with_room[room].pop()
        if not bins_with_room[room]:
            del bins_with_room[room], rooms[at]
        bins[index].append(unit)
        put_back(index, room - weight)
    return bins


def complete_bins(order: Sequence[int], weights_U: Sequence[int], limit: int) -> list[list[int]]:
    """Bins of units, each filled around the largest unit left with what fills it best.

    Looks at BIN_SEARCH fillings of a bin in descending weight (minimum bin slack). Slower than best
    fit, and better where a bin holds few units.
    """
    left: dict[int, list[int]] = {}  # units of each weight, the next one last
    for unit in reversed(order):
        left.setdefault(weights_U[unit], []).append(unit)
    count = {weight: len(units) for weight, units in left.items()}
    sizes = sorted(left)
    bins: list[list[int]] = []
    chosen: list[int] = []
    best: list[int] = []
    best_room = looked_at = 0

    def search(room: int, largest: int) -> None:
        nonlocal best, best_room, looked_at
        looked_at += 1
        if room < best_room:
            best_room, best = room, list(chosen)
        at = bisect_right(sizes, min(room, largest)) - 1
        while at >= 0 and best_room > 0 and looked_at < BIN_SEARCH:
            weight = sizes[at]
            if count[weight]:
                count[weight] -= 1
                chosen.append(weight)
                search(room - weight, weight)
                chosen.pop()
                count[weight] += 1
            at -= 1

    while sizes:
        largest = sizes[-1]
        count[largest] -= 1
        best, best_room, looked_at = [], limit - largest, 0
        search(best_room, limit)
        for weight in best:
            count[weight] -= 1
        bins.append([left[weight].pop() for weight in (largest, *best)])
        for weight in {largest, *best}:
            if not count[weight]:
                del sizes[bisect_left(sizes, weight)]
    return bins


def pack(
    order: Sequence[int],
    weights_U: Sequence[int],
    limit: int,
    bound: int,
    num_ranks: int,
    microbatch_multiple: int,
) -> list[list[int]]:
    """The better of the two packings.

    The second is tried where it could spare a micro-batch and at least one bin in 1000.
    """
    bins = best_fit_decreasing(order, weights_U, limit)
    step = num_ranks * microbatch_multiple
    if -(-len(bins) // step) <= -(-bound // step) or (len(bins) - bound) * 1000 <= bound:
        return bins
    completed = complete_bins(order, weights_U, limit)
    return completed if len(completed) < len(bins) else bins


def spread(
    order: Sequence[int],
    weights_U: Sequence[int],
    costs_U: Sequence[int],
    limit: int,
    num_bins: int,
) -> list[list[int]] | None:
    """Units over `num_bins` bins, each to the cheapest bin that has room; None if one has none.

    Weights come in descending order, so a bin without room for this unit is set aside until the
    units
    are small enough again: each bin is set aside at most once for every unit that it takes.
    """
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [limit] * num_bins
    open_bins = [(0, index) for index in range(num_bins)]
    set_aside: list[tuple[int, int, int]] = []  # (-room, index, cost)
    for unit in order:
        weight = weights_U[unit]
        while set_aside and -set_aside[0][0] >= weight:
            _, index, cost = heapq.heappop(set_aside)
            heapq.heappush(open_bins, (cost, index))
        while open_bins and room[open_bins[0][1]] < weight:
            cost, index = heapq.heappop(open_bins)
            heapq.heappush(set_aside, (-room[index], index, cost))
        if not open_bins:
            return None
        cost, index = open_bins[0]
        bins[index].append(unit)
        room[index] -= weight
        heapq.heapreplace(open_bins, (cost + costs_U[unit], index))
    return bins


def split_to(bins: list[list[int]], costs_U: Sequence[int], num_bins: int) -> list[list[int]]:
    """Split the costliest bin until there are `num_bins`; empty ones only when none can be cut."""
    bins = [list(units) for units in bins]
    heap = [(-sum(costs_U[u] for u in units), i) for i, units in enumerate(bins) if len(units) > 1]
    heapq.heapify(heap)
    while len(bins) < num_bins and heap:
        _, index = heapq.heappop(heap)
        halves: tuple[list[int], list[int]] = ([], [])
        cost = [0, 0]
        for unit in bins[index]:
            side = 0 if cost[0] <= cost[1] else 1
            halves[side].append(unit)
            cost[side] += costs_U[unit]
        bins[index] = halves[0]
        bins.append(halves[1])
        for where, side in ((index, 0), (len(bins) - 1, 1)):
            if len(bins[where]) > 1:
                heapq.heappush(heap, (-cost[side], where))
    bins.extend([] for _ in range(num_bins - len(bins)))
    return bins


def differencing(states: list[tuple[list[int], list[list[int]]]]) -> list[list[int]]:
    """Join partial partitions by largest differencing (Karmarkar-Karp) until one is left.

    Args:
        states: (sums in descending order, the members of each set). The two with the widest spread
            are joined each time, dearest set to cheapest.

    Returns:
        The members of each set, dearest set first.
    """
    heap = [(s[-1] - s[0], number, s, members) for number, (s, members) in enumerate(states)]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, sums_a, sets_a = heapq.heappop(heap)
        _, _, sums_b, sets_b = heapq.heappop(heap)
        sums = [a + b for a, b in zip(sums_a, reversed(sums_b), strict=True)]
        sets = [a + b for a, b in zip(sets_a, reversed(sets_b), strict=True)]
        ranking = sorted(range(len(sums)), key=lambda r: -sums[r])
        sums = [sums[r] for r in ranking]
        heapq.heappush(heap, (sums[-1] - sums[0], number, sums, [sets[r] for r in ranking]))
        number += 1
    return heap[0][3]


def balance(items: Sequence[int], costs: Sequence[int], num_sets: int) -> list[list[int]]:
    """Items to sets without a limit on their number: each item begins as a partition of its own."""
    if not items:
        return [[] for _ in range(num_sets)]
    empty = num_sets - 1
    return differencing(
        [([costs[i]] + [0] * empty, [[i]] + [[] for _ in range(empty)]) for i in items]
    )


def balance_equal(costs_B: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Bins to ranks, as many to each: every run of `num_ranks` bins begins as one bin a rank."""
    order = sorted(range(len(costs_B)), key=lambda b: (-costs_B[b], b))
    if num_ranks == 1:
        return [order]
    runs = [order[at : at + num_ranks] for at in range(0, len(order), num_ranks)]
    return differencing([([costs_B[b] for b in run], [[b] for b in run]) for run in runs])


RankBins = list[list[list[int]]]
"""Units of each bin of each rank."""


def quality(ranks: RankBins, costs_U: Sequence[int]) -> tuple[int, int, int]:
    """Less is better: dummies, then cost of the dearest rank, then of the dearest micro-batch."""
    costs = [[sum(costs_U[u] for u in units) for units in bins] for bins in ranks]
    return (
        sum(not units for bins in ranks for units in bins),
        max(sum(bins) for bins in costs),
        max(max(bins) for bins in costs),
    )


def fill_rank(
    order: Sequence[int],
    weights_U: Sequence[int],
    costs_U: Sequence[int],
    limit: int,
    num_bins: int,
    small: bool,
) -> list[list[int]] | None:
    """Units of one rank over its micro-batches, or None where neither way finds room for all."""
    best = spread(order, weights_U, costs_U, limit, num_bins)
    if small:
        bins = balance(order, costs_U, num_bins)
        if all(sum(weights_U[u] for u in units) <= limit for units in bins) and (
            best is None or quality([bins], costs_U) < quality([best], costs_U)
        ):
            best = bins
    return best


def assign(
    order: Sequence[int],
    packed: list[list[int]],
    weights_U: Sequence[int],
    costs_U: Sequence[int],
    limit: int,
    num_ranks: int,
    num_microbatches: int,
) -> RankBins:
    """Units to `num_microbatches` bins on each of `num_ranks`.

    Units are first balanced over ranks and then inside each: bins made before they are dealt out
    can be so equal that nothing is left to make up for one long sequence. Where the room is too
    tight for that, or it would leave an empty bin that need not be, bins are dealt out after all.

    Args:
        order: units in descending weight.
        packed: bins of a packing of the same units, at most num_ranks * num_microbatches.
    """
    num_bins = num_ranks * num_microbatches
    small = len(order) * max(num_ranks, num_microbatches) <= SMALL
    least_dummies = max(0, num_bins - len(order))
    found: list[RankBins] = []
    splits = []
    if small:
        splits.append([set(units) for units in balance(order, costs_U, num_ranks)])
    room = limit * num_microbatches
    by_rank = spread(order, weights_U, costs_U, room, num_ranks)
    if by_rank is not None:
        splits.append([set(units) for units in by_rank])
    for split in splits:
        rank_of = {unit: rank for rank, units in enumerate(split) for unit in units}
        orders: list[list[int]] = [[] for _ in range(num_ranks)]
        for unit in order:
            orders[rank_of[unit]].append(unit)
        ranks: RankBins = []
        for rank_order in orders:
            bins = fill_rank(rank_order, weights_U, costs_U, limit, num_microbatches, small)
            if bins is None:
                break
            ranks.append(bins)
        else:
            found.append(ranks)
    if not any(quality(ranks, costs_U)[0] == least_dummies for ranks in found):
        spread_bins = None  # with one rank, that is what has been tried
        if num_ranks > 1:
            spread_bins = spread(order, weights_U, costs_U, limit, num_bins)
        for bins in (spread_bins, split_to(packed, costs_U, num_bins)):
            if bins is not None:
                costs_B = [sum(costs_U[u] for u in units) for units in bins]
                dealt = balance_equal(costs_B, num_ranks)
                found.append([[bins[b] for b in rank_bins] for rank_bins in dealt])
    return min(found, key=lambda ranks: quality(ranks, costs_U))


def plan(
    lengths_S: np.ndarray,
    costs_S: np.ndarray,
    units_S: np.ndarray | None,
    ranks_S: np.ndarray | None,
    limit: int,
    dp_size: int,
    seq_multiple: int,
    microbatch_multiple: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int, int]:
    """Micro-batches for every rank.

    Args:
        lengths_S: int64, tokens of each sequence, padded weight at most `limit`.
        costs_S: float64, finite and not negative.
        units_S: int64 labels; sequences with one label go to one micro-batch.
        ranks_S: int32; where given, sequences stay on their rank.
        limit: stored tokens of a micro-batch, a multiple of `seq_multiple`.

    Returns:
        indices_S int32 in storage order, bounds int64 [B + 1] into it (rank after rank), tokens_B
        and costs_B int64 (padded tokens and quantised cost of each), the number of bins before
        counts were made equal, and the lower bound on it.
    """
    quantised = quantise(costs_S)
    lengths = lengths_S.tolist()
    members: list[list[int]] = []
    if units_S is None:
        members = [[i] for i in range(len(lengths))]
    else:
        seen: dict[int, int] = {}
        for i, label in enumerate(units_S.tolist()):
            if label not in seen:
                seen[label] = len(members)
                members.append([])
            members[seen[label]].append(i)
    weights_U = [sum(align_up(lengths[i], seq_multiple) for i in unit) for unit in members]
    costs_U = [sum(quantised[i] for i in unit) for unit in members]
    order = sorted(range(len(members)), key=lambda u: -weights_U[u])

    if ranks_S is None:
        pools = [order]
    else:
        pools = [[] for _ in range(dp_size)]
        for unit in order:
            pools[int(ranks_S[members[unit][0]])].append(unit)
    ranks_per_pool = dp_size // len(pools)
    bound_of = [lower_bound([weights_U[u] for u in pool], limit) for pool in pools]
    packed = [
        pack(pool, weights_U, limit, bound, ranks_per_pool, microbatch_multiple)
        for pool, bound in zip(pools, bound_of, strict=True)
    ]
    most = max(-(-len(bins) // ranks_per_pool) for bins in packed)
    num_microbatches = align_up(max(most, 1), microbatch_multiple)

    indices: list[int] = []
    bounds = [0]
    tokens_B: list[int] = []
    all_costs_B: list[int] = []
    for pool, bins in zip(pools, packed, strict=True):
        for rank_bins in assign(
            pool, bins, weights_U, costs_U, limit, ranks_per_pool, num_microbatches
        ):
            # Dearest first on every rank: the j-th micro-batches are alike across ranks, and a step
            # that does not fit in memory fails at its first micro-batch.
            costs_B = [sum(costs_U[u] for u in units) for units in rank_bins]
            for b in sorted(range(len(rank_bins)), key=lambda b: (-costs_B[b], b)):
                indices.extend(sorted(i for u in rank_bins[b] for i in members[u]))
                bounds.append(len(indices))
                tokens_B.append(sum(weights_U[u] for u in rank_bins[b]))
                all_costs_B.append(costs_B[b])
    return (
        np.asarray(indices, dtype=np.int32),
        np.asarray(bounds, dtype=np.int64),
        np.asarray(tokens_B, dtype=np.int64),
        np.asarray(all_costs_B, dtype=np.int64),
        sum(len(bins) for bins in packed),
        sum(bound_of),
    )


def check_row(
    name: str, row: np.ndarray, dtype: type, index: int, length: int | None = None
) -> np.ndarray:
    if not isinstance(row, np.ndarray) or row.dtype != dtype or row.ndim != 1:
        got = f"{row.dtype} {row.shape}" if isinstance(row, np.ndarray) else type(row).__name__
        raise ValueError(
            f"{name}: row {index} is {got}, expected a vector of {np.dtype(dtype).name}; "
            f"np.ascontiguousarray(..., dtype='{np.dtype(dtype).name}') makes one"
        )
    if not row.flags.c_contiguous:
        raise ValueError(f"{name}: row {index} is strided, expected a contiguous vector")
    if length is not None and len(row) != length:
        raise ValueError(
            f"{name}: row {index} has {len(row)} values, expected {length}, as many as ids"
        )
    return row


def gather(
    prompts: Sequence[np.ndarray] | None,
    ids: Sequence[np.ndarray],
    loss_mask: Sequence[np.ndarray] | None,
    fields: Sequence[Sequence[np.ndarray] | np.ndarray],
    names: Sequence[str],
    indices: np.ndarray,
    lengths: np.ndarray,
    starts: np.ndarray,
    pad_id: int,
    ignore_id: int,
    tokens_T: np.ndarray,
    labels_T: np.ndarray,
    position_ids_T: np.ndarray,
    loss_mask_T: np.ndarray,
    sample_ids_T: np.ndarray,
    fields_T: Sequence[np.ndarray],
    num_threads: int,
) -> None:
    """Fill the buffers of one micro-batch; sequence k takes [starts[k], starts[k + 1]).

    Args:
        prompts, ids: int32 arrays of every sequence; a sequence is its prompt, then its ids.
        loss_mask: bool, as long as `ids`; None stands for all true.
        fields: float32, each as long as `ids`, or one float32 array [S] of one value a sequence.
        names: of the fields, for messages.
        indices: int32, the sequences of this micro-batch.
        lengths: int64, tokens kept of each (prompt and ids).
        num_threads: of interest to the C++ twin only.
    """
    for k, index in enumerate(indices.tolist()):
        start, stop, length = int(starts[k]), int(starts[k + 1]), int(lengths[k])
        own = check_row("ids", ids[index], np.int32, index)
        whole = own
        if prompts is not None:
            whole = np.concatenate([check_row("prompts", prompts[index], np.int32, index), own])
        first = len(whole) - len(own)
        end = start + length
        tokens_T[start:end] = whole[:length]
        tokens_T[end:stop] = pad_id
        labels_T[start : end - 1] = whole[1:length]
        labels_T[end - 1 : stop] = ignore_id
        position_ids_T[start:end] = np.arange(length)
        position_ids_T[end:stop] = 0
        sample_ids_T[start:end] = index
        sample_ids_T[end:stop] = -1
        own_start = min(start + first, end)
        loss_mask_T[start:stop] = False
        loss_mask_T[own_start:end] = True
        if loss_mask is not None:
            mask = check_row("loss_mask", loss_mask[index], np.bool_, index, len(own))
            loss_mask_T[own_start:end] = mask[: end - own_start]
        loss_mask_T[start] = False  # nothing scores the first token
        for name, field, field_T in zip(names, fields, fields_T, strict=True):
            field_T[start:stop] = 0
            if isinstance(field, np.ndarray):
                field_T[own_start:end] = field[index]
            else:
                row = check_row(name, field[index], np.float32, index, len(own))
                field_T[own_start:end] = row[: end - own_start]


def scatter(
    values_T: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    out: np.ndarray,
    out_starts: np.ndarray,
    num_threads: int,
) -> None:
    """Copy `counts[k]` values from `starts[k]` of a micro-batch to `out_starts[k]` of the whole."""
    for start, count, out_start in zip(
        starts.tolist(), counts.tolist(), out_starts.tolist(), strict=True
    ):
        out[out_start : out_start + count] = values_T[start : start + count]


def sort_by_prefix(
    tokens_T: np.ndarray, starts: np.ndarray, lengths: np.ndarray, groups: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Sequences in lexicographic order inside each group, and what each shares with the one before.

    Returns:
        order int32 (groups in ascending order), shared int64: leading tokens equal to those of the
        sequence before it in that order, 0 for the first of a group. In this order the number of
        distinct prefixes of a group is the sum of lengths minus the sum of shared.
    """
    rows = [
        tokens_T[start : start + length]
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
    ]
    labels = groups.tolist()
    keys = [(labels[i], row.tolist(), i) for i, row in enumerate(rows)]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    shared = np.zeros(len(rows), dtype=np.int64)
    for at in range(1, len(order)):
        before, after = order[at - 1], order[at]
        if labels[before] != labels[after]:
            continue
        common = min(len(rows[before]), len(rows[after]))
        differs = np.flatnonzero(rows[before][:common] != rows[after][:common])
        shared[at] = differs[0] if len(differs) else common
    return np.asarray(order, dtype=np.int32), shared

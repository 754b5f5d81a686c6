#include "packing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>

namespace binac {
namespace {

using i32 = std::int32_t;
using i64 = std::int64_t;

constexpr i64 kMaxTokens = std::numeric_limits<i32>::max();

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

void check_range(const char* name, i64 value, i64 low, i64 high) {
  if (value < low || value > high) {
    fail(std::string(name) + ": got " + std::to_string(value) + ", expected an integer in [" +
         std::to_string(low) + ", " + std::to_string(high) + "]");
  }
}

i64 ceil_div(i64 value, i64 divisor) { return (value + divisor - 1) / divisor; }

// Binary min-heap whose keys are distinct, so that the order of pops is unique.
template <typename Key>
class Heap {
 public:
  void reserve(std::size_t n) { keys_.reserve(n); }
  bool empty() const { return keys_.empty(); }
  std::size_t size() const { return keys_.size(); }
  const Key& top() const { return keys_.front(); }

  void push(const Key& key) {
    std::size_t at = keys_.size();
    keys_.push_back(key);
    while (at > 0) {
      const std::size_t up = (at - 1) / 2;
      if (!(key < keys_[up])) break;
      keys_[at] = keys_[up];
      at = up;
    }
    keys_[at] = key;
  }

  void pop() {
    const Key last = keys_.back();
    keys_.pop_back();
    if (!keys_.empty()) sink(last);
  }

 private:
  // Down along the least children, then up: the last key belongs near the bottom.
  void sink(const Key& key) {
    const std::size_t n = keys_.size();
    std::size_t at = 0;
    std::size_t child = 1;
    while (child + 1 < n) {
      child += keys_[child + 1] < keys_[child];
      keys_[at] = keys_[child];
      at = child;
      child = 2 * at + 1;
    }
    if (child < n) {
      keys_[at] = keys_[child];
      at = child;
    }
    while (at > 0) {
      const std::size_t up = (at - 1) / 2;
      if (!(key < keys_[up])) break;
      keys_[at] = keys_[up];
      at = up;
    }
    keys_[at] = key;
  }

  std::vector<Key> keys_;
};

// Set of integers in [0, size) with the nearest member above or below: one bit each, and a bit for every 64 below.
class BitTree {
 public:
  explicit BitTree(i64 size) {
    do {
      size = ceil_div(size, 64);
      levels_[depth_++].resize(static_cast<std::size_t>(size), 0);
    } while (size > 1);
  }

  void insert(i64 x) {
    for (int d = 0; d < depth_; ++d) {
      std::uint64_t& word = levels_[d][x >> 6];
      const bool was_empty = word == 0;
      word |= std::uint64_t{1} << (x & 63);
      if (!was_empty) return;
      x >>= 6;
    }
  }

  void erase(i64 x) {
    for (int d = 0; d < depth_; ++d) {
      std::uint64_t& word = levels_[d][x >> 6];
      word &= ~(std::uint64_t{1} << (x & 63));
      if (word != 0) return;
      x >>= 6;
    }
  }

  // Least member >= x, -1 where there is none.
  i64 successor(i64 x) const {
    for (int d = 0; d < depth_; ++d) {
      const i64 at = x >> 6;
      if (at >= static_cast<i64>(levels_[d].size())) return -1;
      const std::uint64_t at_or_after = levels_[d][at] >> (x & 63);
      if (at_or_after != 0) {
        x += __builtin_ctzll(at_or_after);
        while (d > 0) {
          --d;
          x = (x << 6) + __builtin_ctzll(levels_[d][x]);
        }
        return x;
      }
      x = at + 1;
    }
    return -1;
  }

  // Greatest member <= x, -1 where there is none; x may be -1.
  i64 predecessor(i64 x) const {
    for (int d = 0; d < depth_ && x >= 0; ++d) {
      const std::uint64_t at_or_before = levels_[d][x >> 6] << (63 - (x & 63));
      if (at_or_before != 0) {
        x -= __builtin_clzll(at_or_before);
        while (d > 0) {
          --d;
          x = (x << 6) + 63 - __builtin_clzll(levels_[d][x]);
        }
        return x;
      }
      x = (x >> 6) - 1;
    }
    return -1;
  }

 private:
  int depth_ = 0;
  std::vector<std::uint64_t> levels_[11];  // 64 ** 11 > 2 ** 63
};

// Costs as integers >= 1 whose sum stays below 2**63. The scale is a power of two taken from the
// largest cost and the count alone: a scale from the sum would depend on the order of summation.
std::vector<i64> quantise(View<double> costs) {
  double largest = 0.0;
  for (i64 i = 0; i < costs.size; ++i) largest = std::max(largest, costs[i]);
  std::vector<i64> out(costs.size, 1);
  if (largest == 0.0) return out;
  int exponent = 0;
  std::frexp(largest, &exponent);
  int bits = 0;
  for (i64 n = costs.size; n > 0; n >>= 1) ++bits;
  const int shift = 62 - exponent - bits;
  // Two factors, since one alone may not be a double. What underflows on the way is below 1 anyway.
  const double half = std::ldexp(1.0, shift / 2);
  const double rest = std::ldexp(1.0, shift - shift / 2);
  for (i64 i = 0; i < costs.size; ++i) {
    out[i] = std::max<i64>(static_cast<i64>(costs[i] * half * rest), 1);
  }
  return out;
}

// What stays together, with weights in multiples of seq_multiple.
struct Units {
  std::vector<i32> of_sequence;  // empty: every sequence is its own unit
  std::vector<i64> weights;  // of a unit that is too large this may exceed the limit
  std::vector<i64> costs;
  std::vector<i32> first;  // first sequence of each; empty: itself
  i64 size() const { return static_cast<i64>(weights.size()); }
};

Units make_units(View<i64> lengths, std::vector<i64> costs, View<i64> labels, i64 seq_multiple) {
  Units units;
  if (labels.size == 0) {
    units.weights.resize(lengths.size);
    for (i64 i = 0; i < lengths.size; ++i) units.weights[i] = ceil_div(lengths[i], seq_multiple);
    units.costs = std::move(costs);
    return units;
  }
  std::unordered_map<i64, i32> unit_of;
  unit_of.reserve(lengths.size);
  units.of_sequence.resize(lengths.size);
  for (i64 i = 0; i < lengths.size; ++i) {
    const auto [at, is_new] = unit_of.try_emplace(labels[i], static_cast<i32>(units.size()));
    if (is_new) {
      units.first.push_back(static_cast<i32>(i));
      units.weights.push_back(0);
      units.costs.push_back(0);
    }
    units.of_sequence[i] = at->second;
    units.weights[at->second] += ceil_div(lengths[i], seq_multiple);
    units.costs[at->second] += costs[i];
  }
  return units;
}

// Units in descending weight, ties in ascending index, as they are worked through: side by side in
// memory, since a million of them looked up one by one would wait for the cache a million times.
struct Items {
  std::vector<i32> weights;
  std::vector<i64> costs;
  explicit Items(i64 n = 0) : weights(n), costs(n) {}
  i64 size() const { return static_cast<i64>(weights.size()); }
};

// Units in descending weight, ties in ascending index.
std::vector<i32> sort_units(const std::vector<i64>& weights, i64 limit) {
  const i64 n = static_cast<i64>(weights.size());
  std::vector<i32> order(n);
  if (limit > 4 * n + 65536) {  // the counters would cost more than the sort
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](i32 a, i32 b) { return weights[a] > weights[b]; });
    return order;
  }
  std::vector<i64> place(limit + 2, 0);
  for (i64 u = 0; u < n; ++u) ++place[limit - weights[u] + 1];
  std::partial_sum(place.begin(), place.end(), place.begin());
  for (i64 u = 0; u < n; ++u) order[place[limit - weights[u]]++] = static_cast<i32>(u);
  return order;
}

// The bound L2 of Martello and Toth over every threshold: an item over half the limit takes a bin of
// its own; those up to limit - threshold have room left for items of at least the threshold, and the
// rest of these need further bins.
i64 lower_bound(const std::vector<i32>& weights, i64 limit) {
  const i64 n = static_cast<i64>(weights.size());
  i64 half = 0;
  i64 spare = 0;  // room beside the items over half the limit
  while (half < n && 2 * i64{weights[half]} > limit) spare += limit - weights[half++];
  i64 small = 0;  // the other items, of at least the threshold
  for (i64 i = half; i < n; ++i) small += weights[i];
  const auto bins = [&] { return half + (small > spare ? ceil_div(small - spare, limit) : 0); };
  i64 best = bins();
  i64 closed = 0;  // items too large to take anything of the threshold's size
  for (i64 i = n - 1; i >= half; --i) {
    if (i + 1 == n || weights[i] != weights[i + 1]) {
      while (closed < half && weights[closed] > limit - weights[i]) {
        spare -= limit - weights[closed++];
      }
      best = std::max(best, bins());
    }
    small -= weights[i];
  }
  return best;
}

// Bin of each item: where it leaves the least room, else a new one. Returns the number of bins.
i64 best_fit_decreasing(const std::vector<i32>& weights, i64 limit, std::vector<i32>& bin_of) {
  BitTree rooms(limit + 1);
  std::vector<i32> head(limit + 1, -1);  // latest bin with this room
  std::vector<i32> next;
  bin_of.resize(weights.size());
  for (std::size_t k = 0; k < weights.size(); ++k) {
    const i64 weight = weights[k];
    i64 room = rooms.successor(weight);
    i32 bin = 0;
    if (room < 0) {
      bin = static_cast<i32>(next.size());
      next.push_back(-1);
      room = limit;
    } else {
      bin = head[room];
      head[room] = next[bin];
      if (head[room] < 0) rooms.erase(room);
    }
    bin_of[k] = bin;
    const i64 left = room - weight;
    if (left == 0) continue;  // nothing fits any more
    next[bin] = head[left];
    if (head[left] < 0) rooms.insert(left);
    head[left] = bin;
  }
  return static_cast<i64>(next.size());
}

// The cheapest of a fixed number of bins, ties to the lower index, as the winner of a knock-out: a new
// cost is carried to the top by one comparison a level, without a branch that could be guessed wrong.
class CheapestBin {
 public:
  static constexpr i64 kAside = std::numeric_limits<i64>::max() - 1;

  // Every bin begins at cost 0.
  explicit CheapestBin(i64 num_bins) {
    while (leaves_ < num_bins) leaves_ *= 2;
    nodes_.resize(2 * leaves_);
    for (i64 b = 0; b < leaves_; ++b) {
      nodes_[leaves_ + b] = {b < num_bins ? 0 : kAside, static_cast<i32>(b)};
    }
    for (i64 n = leaves_ - 1; n > 0; --n) nodes_[n] = nodes_[2 * n];
  }

  i32 bin() const { return nodes_[1].bin; }
  i64 cost() const { return nodes_[1].cost; }

  void set(i32 bin, i64 cost) {
    i64 at = leaves_ + bin;
    Node best{cost, bin};
    nodes_[at] = best;
    for (; at > 1; at >>= 1) {
      const Node& other = nodes_[at ^ 1];
      // All ones where the other one wins; the left one wins a tie. Written out, since a compiler
      // makes a jump of a conditional.
      const i64 other_wins = -static_cast<i64>(other.cost < best.cost + (at & 1));
      best.cost ^= (best.cost ^ other.cost) & other_wins;
      best.bin ^= (best.bin ^ other.bin) & static_cast<i32>(other_wins);
      nodes_[at >> 1] = best;
    }
  }

 private:
  struct Node {  // winner of the knock-out below; the leaves are the bins
    i64 cost;
    i32 bin;
  };
  i64 leaves_ = 1;
  std::vector<Node> nodes_;
};

// Bins filled one after the other, each around the largest item that is left, with what fills it best
// among kBinSearch combinations in descending weight (minimum bin slack). Slower than best fit, and
// better where a bin holds few items.
class BinCompletion {
 public:
  BinCompletion(const std::vector<i32>& weights, i64 limit)
      : weights_(weights), count_(limit + 1, 0), next_(limit + 1, 0), present_(limit + 1) {
    for (std::size_t k = weights.size(); k-- > 0;) {
      ++count_[weights[k]];
      next_[weights[k]] = static_cast<i32>(k);  // items of one weight lie side by side
      present_.insert(weights[k]);
    }
    limit_ = limit;
  }

  // Bin of each item, and the number of bins.
  i64 run(std::vector<i32>& bin_of) {
    bin_of.resize(weights_.size());
    i32 bin = 0;
    for (i64 largest; (largest = present_.predecessor(limit_)) > 0; ++bin) {
      take(largest);
      bin_of[next_[largest]++] = bin;
      best_room_ = limit_ - largest;
      best_.clear();
      chosen_.clear();
      looked_at_ = 0;
      search(best_room_, limit_);
      for (const i32 weight : best_) {
        take(weight);
        bin_of[next_[weight]++] = bin;
      }
    }
    return bin;
  }

 private:
  void take(i64 weight) {
    if (--count_[weight] == 0) present_.erase(weight);
  }

  void put_back(i64 weight) {
    if (count_[weight]++ == 0) present_.insert(weight);
  }

  bool done() const { return best_room_ == 0 || looked_at_ >= kBinSearch; }

  void search(i64 room, i64 largest) {
    ++looked_at_;
    if (room < best_room_) {
      best_room_ = room;
      best_ = chosen_;
    }
    for (i64 weight = present_.predecessor(std::min(room, largest)); weight > 0 && !done();
         weight = present_.predecessor(weight - 1)) {
      take(weight);
      chosen_.push_back(static_cast<i32>(weight));
      search(room - weight, weight);
      chosen_.pop_back();
      put_back(weight);
    }
  }

  const std::vector<i32>& weights_;
  std::vector<i32> count_;
  std::vector<i32> next_;
  BitTree present_;
  i64 limit_ = 0;
  i64 best_room_ = 0;
  int looked_at_ = 0;
  std::vector<i32> best_;
  std::vector<i32> chosen_;
};

// Bin of each item by the better of the two packings, and the number of bins. The second is tried where
// it could spare a micro-batch and at least one bin in 1000.
i64 pack(const std::vector<i32>& weights, i64 limit, i64 bound, i64 num_ranks,
         i64 microbatch_multiple, std::vector<i32>& bin_of) {
  const i64 best_fit = best_fit_decreasing(weights, limit, bin_of);
  const i64 step = num_ranks * microbatch_multiple;
  if (ceil_div(best_fit, step) <= ceil_div(bound, step) || (best_fit - bound) * 1000 <= bound) {
    return best_fit;
  }
  std::vector<i32> other;
  const i64 completed = BinCompletion(weights, limit).run(other);
  if (completed >= best_fit) return best_fit;
  bin_of = std::move(other);
  return completed;
}

struct AsideBin {
  i64 room;
  i64 cost;
  i32 bin;
  bool operator<(const AsideBin& other) const {
    return room != other.room ? room > other.room : bin < other.bin;
  }
};

// Items to bins, each to the cheapest that has room; false where one finds none. Weights come in
// descending order, so a bin without room for this item is set aside until the items are small enough
// again: at most once for every item that it takes.
bool spread(const Items& items, i64 limit, i64 num_bins, std::vector<i32>& bin_of) {
  const i64 count = items.size();
  bin_of.resize(count);
  std::vector<i64> room(num_bins, limit);
  CheapestBin open(num_bins);
  Heap<AsideBin> aside;
  for (i64 k = 0; k < count; ++k) {
    const i64 weight = items.weights[k];
    while (!aside.empty() && aside.top().room >= weight) {
      open.set(aside.top().bin, aside.top().cost);
      aside.pop();
    }
    while (open.cost() != CheapestBin::kAside && room[open.bin()] < weight) {
      const i32 bin = open.bin();
      aside.push({room[bin], open.cost(), bin});
      open.set(bin, CheapestBin::kAside);
    }
    if (open.cost() == CheapestBin::kAside) return false;
    const i32 bin = open.bin();
    bin_of[k] = bin;
    room[bin] -= weight;
    open.set(bin, open.cost() + items.costs[k]);
  }
  return true;
}

// Split the costliest bin until there are num_bins; empty ones only when none can be cut.
void split_to(const Items& items, i64 have, i64 num_bins, std::vector<i32>& bin_of) {
  if (have == num_bins) return;
  const i64 n = items.size();
  std::vector<i64> cost(have, 0);
  std::vector<i64> bounds(have + 1, 0);
  for (i64 k = 0; k < n; ++k) {
    cost[bin_of[k]] += items.costs[k];
    ++bounds[bin_of[k] + 1];
  }
  std::partial_sum(bounds.begin(), bounds.end(), bounds.begin());
  std::vector<i64> cursor(bounds.begin(), bounds.end() - 1);
  std::vector<i32> flat(n);  // items of bin after bin
  for (i64 k = 0; k < n; ++k) flat[cursor[bin_of[k]]++] = static_cast<i32>(k);
  struct Largest {
    i64 cost;
    i32 bin;
    bool operator<(const Largest& other) const {
      return cost != other.cost ? cost > other.cost : bin < other.bin;
    }
  };
  Heap<Largest> heap;
  for (i64 b = 0; b < have; ++b) {
    if (bounds[b + 1] - bounds[b] > 1) heap.push({cost[b], static_cast<i32>(b)});
  }
  std::unordered_map<i32, std::vector<i32>> parts;  // items of the bins that were made by a split
  i64 made = have;
  while (made < num_bins && !heap.empty()) {
    const i32 bin = heap.top().bin;
    heap.pop();
    const auto [at, is_whole] = parts.try_emplace(bin);
    if (is_whole) at->second.assign(flat.begin() + bounds[bin], flat.begin() + bounds[bin + 1]);
    std::vector<i32> halves[2];
    i64 sums[2] = {0, 0};
    for (const i32 k : at->second) {
      const int side = sums[0] <= sums[1] ? 0 : 1;
      halves[side].push_back(k);
      sums[side] += items.costs[k];
    }
    const i32 added = static_cast<i32>(made++);
    for (const i32 k : halves[1]) bin_of[k] = added;
    if (halves[0].size() > 1) heap.push({sums[0], bin});
    if (halves[1].size() > 1) heap.push({sums[1], added});
    at->second = std::move(halves[0]);
    parts[added] = std::move(halves[1]);
  }
}

// One set of a partition; its members are a chain through `next`.
struct Set {
  i64 sum = 0;
  i32 head = -1;
  i32 tail = -1;
};

// The sets that are not empty, dearest first.
using Partition = std::vector<Set>;

// `b` into `a`, both partitions into num_sets: dearest set to cheapest.
void join(Partition& a, const Partition& b, i64 num_sets, std::vector<i32>& next) {
  const i64 in_a = static_cast<i64>(a.size());
  const i64 first = num_sets - static_cast<i64>(b.size());  // place of the cheapest set of b
  for (i64 at = first; at < in_a; ++at) {
    const Set& other = b[num_sets - 1 - at];
    a[at].sum += other.sum;
    next[a[at].tail] = other.head;
    a[at].tail = other.tail;
  }
  for (i64 at = std::max(first, in_a); at < num_sets; ++at) a.push_back(b[num_sets - 1 - at]);
  const auto dearer = [](const Set& x, const Set& y) { return x.sum > y.sum; };
  if (a.size() > 32) {
    std::stable_sort(a.begin(), a.end(), dearer);
    return;
  }
  for (std::size_t at = 1; at < a.size(); ++at) {  // stable_sort would ask for memory
    const Set set = a[at];
    std::size_t to = at;
    for (; to > 0 && dearer(set, a[to - 1]); --to) a[to] = a[to - 1];
    a[to] = set;
  }
}

// Partial partitions into num_sets joined by largest differencing (Karmarkar-Karp) until one is left:
// the two with the widest spread each time.
Partition differencing(std::vector<Partition> states, i64 num_sets, std::vector<i32>& next) {
  struct Entry {
    i64 minus_spread;
    i64 number;
    bool operator<(const Entry& other) const {
      return minus_spread != other.minus_spread ? minus_spread < other.minus_spread
                                                : number < other.number;
    }
  };
  const auto entry = [&](const Partition& p, i64 number) {
    const i64 least = static_cast<i64>(p.size()) == num_sets ? p.back().sum : 0;
    return Entry{least - p.front().sum, number};
  };
  Heap<Entry> heap;
  heap.reserve(states.size());
  const i64 num_states = static_cast<i64>(states.size());
  for (i64 s = 0; s < num_states; ++s) heap.push(entry(states[s], s));
  // A joined partition takes the place of its first part, under a new number.
  std::vector<i64> place(2 * num_states);
  std::iota(place.begin(), place.begin() + num_states, 0);
  i64 number = num_states;
  while (heap.size() > 1) {
    const i64 first = place[heap.top().number];
    heap.pop();
    const i64 second = place[heap.top().number];
    heap.pop();
    join(states[first], states[second], num_sets, next);
    Partition().swap(states[second]);
    place[number] = first;
    heap.push(entry(states[first], number));
    ++number;
  }
  return std::move(states[place[heap.top().number]]);
}

// Set of each item (aligned with `costs`), without a limit on the number in a set.
std::vector<i32> balance(const std::vector<i64>& costs, i64 num_sets) {
  const i64 n = static_cast<i64>(costs.size());
  std::vector<i32> set_of(n);
  if (n == 0) return set_of;
  std::vector<i32> next(n, -1);
  std::vector<Partition> states(n);
  for (i64 i = 0; i < n; ++i) {
    states[i] = {{costs[i], static_cast<i32>(i), static_cast<i32>(i)}};
  }
  const Partition done = differencing(std::move(states), num_sets, next);
  for (std::size_t r = 0; r < done.size(); ++r) {
    for (i32 i = done[r].head; i >= 0; i = next[i]) set_of[i] = static_cast<i32>(r);
  }
  return set_of;
}

// New number of each bin, rank * num_microbatches + place: as many bins to every rank.
std::vector<i32> balance_equal(const std::vector<i64>& costs, i64 num_ranks) {
  const i64 n = static_cast<i64>(costs.size());
  std::vector<i32> order(n);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](i32 a, i32 b) {
    return costs[a] != costs[b] ? costs[a] > costs[b] : a < b;
  });
  const i64 per_rank = n / num_ranks;
  std::vector<i32> renamed(n);
  if (num_ranks == 1) {
    for (i64 i = 0; i < n; ++i) renamed[order[i]] = static_cast<i32>(i);
    return renamed;
  }
  std::vector<i32> next(n, -1);
  std::vector<Partition> states(per_rank, Partition(num_ranks));
  for (i64 i = 0; i < n; ++i) {
    states[i / num_ranks][i % num_ranks] = {costs[order[i]], order[i], order[i]};
  }
  const Partition done = differencing(std::move(states), num_ranks, next);
  for (i64 r = 0; r < num_ranks; ++r) {
    i64 at = r * per_rank;
    for (i32 b = done[r].head; b >= 0; b = next[b]) renamed[b] = static_cast<i32>(at++);
  }
  return renamed;
}

// Less is better: dummies, then cost of the dearest rank, then of the dearest micro-batch.
using Quality = std::tuple<i64, i64, i64>;

Quality quality(const Items& items, const std::vector<i32>& bin_of, i64 num_ranks,
                i64 num_microbatches) {
  const i64 num_bins = num_ranks * num_microbatches;
  std::vector<i64> cost(num_bins, 0);
  for (i64 k = 0; k < items.size(); ++k) cost[bin_of[k]] += items.costs[k];
  i64 empty = 0;
  i64 dearest_rank = 0;
  i64 dearest_bin = 0;
  for (i64 r = 0; r < num_ranks; ++r) {
    i64 sum = 0;
    for (i64 b = r * num_microbatches; b < (r + 1) * num_microbatches; ++b) {
      empty += cost[b] == 0;  // the cost of an item is at least 1
      sum += cost[b];
      dearest_bin = std::max(dearest_bin, cost[b]);
    }
    dearest_rank = std::max(dearest_rank, sum);
  }
  return {empty, dearest_rank, dearest_bin};
}

// Items of one rank over its micro-batches; false where neither way finds room for all.
bool fill_rank(const Items& items, i64 limit, i64 num_bins, bool small, std::vector<i32>& bin_of) {
  const bool fits = spread(items, limit, num_bins, bin_of);
  if (!small) return fits;
  std::vector<i32> other = balance(items.costs, num_bins);
  std::vector<i64> used(num_bins, 0);
  for (i64 k = 0; k < items.size(); ++k) used[other[k]] += items.weights[k];
  if (*std::max_element(used.begin(), used.end()) > limit) return fits;
  if (!fits || quality(items, other, 1, num_bins) < quality(items, bin_of, 1, num_bins)) {
    bin_of = std::move(other);
  }
  return true;
}

// Bin (rank * num_microbatches + place) of each item. Items are first balanced over ranks and then
// inside each: bins made before they are dealt out can be so equal that nothing is left to make up for
// one long sequence. Where the room is too tight for that, or it would leave an empty bin that need not
// be, bins are dealt out after all. `packed` is a packing into `have` <= num_ranks * num_microbatches
// bins.
std::vector<i32> assign(const Items& items, std::vector<i32> packed, i64 have, i64 limit,
                        i64 num_ranks, i64 num_microbatches) {
  const i64 n = items.size();
  const i64 num_bins = num_ranks * num_microbatches;
  const bool small = n * std::max(num_ranks, num_microbatches) <= kSmall;
  const i64 least_dummies = std::max<i64>(0, num_bins - n);

  std::vector<std::vector<i32>> splits;  // rank of each item
  if (small) splits.push_back(balance(items.costs, num_ranks));
  std::vector<i32> by_rank;
  if (spread(items, limit * num_microbatches, num_ranks, by_rank)) {
    splits.push_back(std::move(by_rank));
  }

  bool found = false;
  std::vector<i32> best;
  Quality best_quality;
  const auto offer = [&](std::vector<i32> bin_of) {
    const Quality q = quality(items, bin_of, num_ranks, num_microbatches);
    if (!found || q < best_quality) {
      best = std::move(bin_of);
      best_quality = q;
      found = true;
    }
  };

  for (const auto& rank_of : splits) {
    std::vector<i64> counts(num_ranks, 0);
    for (const i32 r : rank_of) ++counts[r];
    std::vector<Items> of_rank;
    for (const i64 count : counts) of_rank.emplace_back(count);
    std::vector<i64> cursor(num_ranks, 0);
    for (i64 k = 0; k < n; ++k) {
      const i32 r = rank_of[k];
      of_rank[r].weights[cursor[r]] = items.weights[k];
      of_rank[r].costs[cursor[r]++] = items.costs[k];
    }
    std::vector<std::vector<i32>> local(num_ranks);
    bool fits = true;
    for (i64 r = 0; r < num_ranks && fits; ++r) {
      fits = fill_rank(of_rank[r], limit, num_microbatches, small, local[r]);
    }
    if (!fits) continue;
    std::vector<i32> bin_of(n);
    std::fill(cursor.begin(), cursor.end(), 0);
    for (i64 k = 0; k < n; ++k) {
      const i32 r = rank_of[k];
      bin_of[k] = static_cast<i32>(r * num_microbatches + local[r][cursor[r]++]);
    }
    offer(std::move(bin_of));
  }
  if (found && std::get<0>(best_quality) == least_dummies) return best;

  const auto deal = [&](std::vector<i32> bin_of) {
    std::vector<i64> cost(num_bins, 0);
    for (i64 k = 0; k < n; ++k) cost[bin_of[k]] += items.costs[k];
    const std::vector<i32> renamed = balance_equal(cost, num_ranks);
    for (auto& bin : bin_of) bin = renamed[bin];
    offer(std::move(bin_of));
  };
  std::vector<i32> over_all;  // with one rank, that is what has been tried
  if (num_ranks > 1 && spread(items, limit, num_bins, over_all)) deal(std::move(over_all));
  split_to(items, have, num_bins, packed);
  deal(std::move(packed));
  return best;
}

void check_plan(View<i64> lengths, View<double> costs, View<i64> units, View<i32> ranks, i64 limit,
                i64 dp_size, i64 seq_multiple, i64 microbatch_multiple) {
  check_range("lengths", lengths.size, 0, kMaxTokens);
  check_range("seq_multiple", seq_multiple, 1, kMaxTokens);
  check_range("capacity", limit, seq_multiple, kMaxTokens);
  check_range("capacity", limit / seq_multiple, 1, kMaxRoom);
  check_range("dp_size", dp_size, 1, kMaxBins);
  check_range("microbatch_multiple", microbatch_multiple, 1, kMaxBins);
  const auto same_size = [&](const char* name, i64 size) {
    if (size != lengths.size) {
      fail(std::string(name) + ": got " + std::to_string(size) + " values, expected " +
           std::to_string(lengths.size) + ", one for each sequence");
    }
  };
  same_size("costs", costs.size);
  if (units.data != nullptr) same_size("units", units.size);
  if (ranks.data != nullptr) same_size("ranks", ranks.size);
  for (i64 i = 0; i < lengths.size; ++i) {
    if (lengths[i] < 1 || lengths[i] > limit) {
      fail("lengths: sequence " + std::to_string(i) + " has " + std::to_string(lengths[i]) +
           " tokens, expected 1 to " + std::to_string(limit));
    }
    if (!(costs[i] >= 0.0) || !std::isfinite(costs[i])) {
      fail("costs: sequence " + std::to_string(i) + " costs " + std::to_string(costs[i]) +
           ", expected a finite number >= 0");
    }
    if (ranks.data != nullptr && (ranks[i] < 0 || ranks[i] >= dp_size)) {
      fail("ranks: sequence " + std::to_string(i) + " is on rank " + std::to_string(ranks[i]) +
           ", expected one in [0, " + std::to_string(dp_size - 1) + "]");
    }
  }
}

// Run work(begin, end) over [0, count) on num_threads threads; 0 threads: as the size deserves.
template <typename Work>
void parallel_for(i64 count, i64 bytes, int num_threads, const Work& work) {
  if (num_threads == 0) {
    // Below some 4 MiB a thread costs more than it copies.
    const i64 wish = std::min<i64>(bytes >> 22, std::thread::hardware_concurrency());
    num_threads = static_cast<int>(std::clamp<i64>(wish, 1, 8));
  }
  const i64 workers = std::min<i64>(num_threads, std::max<i64>(count, 1));
  if (workers <= 1) {
    work(0, count);
    return;
  }
  std::vector<std::thread> threads;
  threads.reserve(workers - 1);
  const auto cut = [&](i64 w) { return count * w / workers; };
  for (i64 w = 1; w < workers; ++w) threads.emplace_back(work, cut(w), cut(w + 1));
  work(0, cut(1));
  for (auto& thread : threads) thread.join();
}

}  // namespace

Plan plan(View<i64> lengths, View<double> costs, View<i64> units_view, View<i32> ranks, i64 limit,
          i64 dp_size, i64 seq_multiple, i64 microbatch_multiple) {
  check_plan(lengths, costs, units_view, ranks, limit, dp_size, seq_multiple, microbatch_multiple);
  const i64 room = limit / seq_multiple;
  const Units units = make_units(lengths, quantise(costs), units_view, seq_multiple);
  for (i64 u = 0; u < units.size(); ++u) {
    if (units.weights[u] > room) {
      fail("units: the unit of sequence " + std::to_string(units.first[u]) + " has " +
           std::to_string(units.weights[u] * seq_multiple) + " tokens, expected at most " +
           std::to_string(limit));
    }
  }
  std::vector<i32> order = sort_units(units.weights, room);

  std::vector<std::vector<i32>> pools;  // units that share ranks, in descending weight
  if (ranks.data == nullptr) {
    pools.push_back(std::move(order));
  } else {
    pools.resize(dp_size);
    for (const i32 u : order) pools[ranks[units.first.empty() ? u : units.first[u]]].push_back(u);
  }
  const i64 num_pools = static_cast<i64>(pools.size());
  const i64 ranks_per_pool = dp_size / num_pools;

  Plan out;
  std::vector<Items> items(num_pools);
  std::vector<std::vector<i32>> packed(num_pools);
  std::vector<i64> num_packed(num_pools);
  i64 most = 1;
  for (i64 p = 0; p < num_pools; ++p) {
    items[p] = Items(static_cast<i64>(pools[p].size()));
    for (std::size_t k = 0; k < pools[p].size(); ++k) {
      items[p].weights[k] = static_cast<i32>(units.weights[pools[p][k]]);
      items[p].costs[k] = units.costs[pools[p][k]];
    }
    const i64 bound = lower_bound(items[p].weights, room);
    num_packed[p] = pack(items[p].weights, room, bound, ranks_per_pool, microbatch_multiple,
                         packed[p]);
    out.lower_bound += bound;
    out.num_bins += num_packed[p];
    most = std::max(most, ceil_div(num_packed[p], ranks_per_pool));
  }
  const i64 num_microbatches = ceil_div(most, microbatch_multiple) * microbatch_multiple;
  if (num_microbatches > kMaxBins / dp_size) {
    fail("microbatch_multiple: " + std::to_string(num_microbatches) + " micro-batches on each of " +
         std::to_string(dp_size) + " ranks, expected at most " + std::to_string(kMaxBins) +
         " in all");
  }
  const i64 num_bins = dp_size * num_microbatches;

  std::vector<i32> bin_of_unit(units.size());
  std::vector<i64> bin_cost(num_bins, 0);
  std::vector<i64> bin_weight(num_bins, 0);
  for (i64 p = 0; p < num_pools; ++p) {
    const std::vector<i32> bin_of = assign(items[p], std::move(packed[p]), num_packed[p], room,
                                           ranks_per_pool, num_microbatches);
    const i64 base = p * ranks_per_pool * num_microbatches;
    for (std::size_t k = 0; k < bin_of.size(); ++k) {
      bin_of_unit[pools[p][k]] = static_cast<i32>(base + bin_of[k]);
      bin_cost[base + bin_of[k]] += items[p].costs[k];
      bin_weight[base + bin_of[k]] += items[p].weights[k];
    }
  }

  // Dearest first on every rank: the j-th micro-batches are alike across ranks, and a step that does
  // not fit in memory fails at its first micro-batch.
  std::vector<i32> place_of_bin(num_bins);
  out.tokens.resize(num_bins);
  out.costs.resize(num_bins);
  std::vector<i32> bins(num_microbatches);
  for (i64 r = 0; r < dp_size; ++r) {
    const i64 base = r * num_microbatches;
    std::iota(bins.begin(), bins.end(), static_cast<i32>(base));
    std::sort(bins.begin(), bins.end(), [&](i32 a, i32 b) {
      return bin_cost[a] != bin_cost[b] ? bin_cost[a] > bin_cost[b] : a < b;
    });
    for (i64 j = 0; j < num_microbatches; ++j) {
      place_of_bin[bins[j]] = static_cast<i32>(base + j);
      out.tokens[base + j] = bin_weight[bins[j]] * seq_multiple;
      out.costs[base + j] = bin_cost[bins[j]];
    }
  }
  std::vector<i32> place(lengths.size);
  out.bounds.assign(num_bins + 1, 0);
  for (i64 i = 0; i < lengths.size; ++i) {
    const i64 unit = units.of_sequence.empty() ? i : units.of_sequence[i];
    place[i] = place_of_bin[bin_of_unit[unit]];
    ++out.bounds[place[i] + 1];
  }
  std::partial_sum(out.bounds.begin(), out.bounds.end(), out.bounds.begin());
  std::vector<i64> cursor(out.bounds.begin(), out.bounds.end() - 1);
  out.indices.resize(lengths.size);
  for (i64 i = 0; i < lengths.size; ++i) out.indices[cursor[place[i]]++] = static_cast<i32>(i);
  return out;
}

void gather(const std::vector<Source>& sources, const std::vector<Field>& fields,
            const Buffers& out, i64 pad_id, i64 ignore_id, int num_threads) {
  const i64 num = static_cast<i64>(sources.size());
  i64 tokens = 0;
  for (const Source& s : sources) {
    if (s.length < 1 || s.length > s.prompt.size + s.ids.size || s.start + s.length > s.stop) {
      fail("lengths: sequence " + std::to_string(s.index) + " keeps " + std::to_string(s.length) +
           " tokens, expected 1 to " + std::to_string(s.prompt.size + s.ids.size) +
           " and room for them");
    }
    tokens += s.stop - s.start;
  }
  const auto work = [&](i64 begin, i64 end) {
    for (i64 k = begin; k < end; ++k) {
      const Source& s = sources[k];
      const i64 before = std::min(s.prompt.size, s.length);
      const i64 own = s.length - before;
      const i64 real_end = s.start + s.length;
      i64* token = out.tokens + s.start;
      std::copy_n(s.prompt.data, before, token);
      std::copy_n(s.ids.data, own, token + before);
      std::fill(out.tokens + real_end, out.tokens + s.stop, pad_id);
      std::copy_n(token + 1, s.length - 1, out.labels + s.start);
      std::fill(out.labels + real_end - 1, out.labels + s.stop, ignore_id);
      std::iota(out.position_ids + s.start, out.position_ids + real_end, i64{0});
      std::fill(out.position_ids + real_end, out.position_ids + s.stop, i64{0});
      std::fill(out.sample_ids + s.start, out.sample_ids + real_end, s.index);
      std::fill(out.sample_ids + real_end, out.sample_ids + s.stop, -1);
      bool* mask = out.loss_mask + s.start;
      std::fill_n(mask, s.stop - s.start, false);
      if (s.loss_mask == nullptr) {
        std::fill_n(mask + before, own, true);
      } else {
        std::copy_n(s.loss_mask, own, mask + before);
      }
      mask[0] = false;  // nothing scores the first token
      for (const Field& field : fields) {
        float* value = field.out + s.start;
        std::fill_n(value, before, 0.0F);
        if (field.rows.empty()) {
          std::fill_n(value + before, own, field.values[k]);
        } else {
          std::copy_n(field.rows[k], own, value + before);
        }
        std::fill(field.out + real_end, field.out + s.stop, 0.0F);
      }
    }
  };
  parallel_for(num, tokens * static_cast<i64>(29 + 4 * fields.size()), num_threads, work);
}

void scatter(const std::byte* values, i64 num_values, View<i64> starts, View<i64> counts,
             std::byte* out, i64 num_out, View<i64> out_starts, std::size_t item_size,
             int num_threads) {
  if (counts.size != starts.size || out_starts.size != starts.size) {
    fail("counts: expected as many values as starts and out_starts");
  }
  i64 total = 0;
  for (i64 k = 0; k < starts.size; ++k) {
    const i64 count = counts[k];
    if (count < 0 || starts[k] < 0 || starts[k] > num_values - count) {
      fail("starts: run " + std::to_string(k) + " leaves the micro-batch");
    }
    if (out_starts[k] < 0 || out_starts[k] > num_out - count) {
      fail("out_starts: run " + std::to_string(k) + " leaves the output");
    }
    total += count;
  }
  const auto work = [&](i64 begin, i64 end) {
    for (i64 k = begin; k < end; ++k) {
      if (counts[k] == 0) continue;
      std::memcpy(out + out_starts[k] * static_cast<i64>(item_size),
                  values + starts[k] * static_cast<i64>(item_size), counts[k] * item_size);
    }
  };
  parallel_for(starts.size, total * static_cast<i64>(item_size), num_threads, work);
}

PrefixOrder sort_by_prefix(View<i64> tokens, View<i64> starts, View<i64> lengths,
                           View<i64> groups) {
  if (lengths.size != starts.size || groups.size != starts.size) {
    fail("lengths: expected as many values as starts and groups");
  }
  check_range("starts", starts.size, 0, kMaxTokens);
  for (i64 i = 0; i < starts.size; ++i) {
    if (lengths[i] < 0 || starts[i] < 0 || starts[i] > tokens.size - lengths[i]) {
      fail("lengths: sequence " + std::to_string(i) + " leaves the tokens");
    }
  }
  const auto first_difference = [&](i32 a, i32 b) {
    const i64* row = tokens.data + starts[a];
    return std::mismatch(row, row + std::min(lengths[a], lengths[b]), tokens.data + starts[b])
               .first - row;
  };
  PrefixOrder out;
  out.order.resize(starts.size);
  std::iota(out.order.begin(), out.order.end(), 0);
  std::sort(out.order.begin(), out.order.end(), [&](i32 a, i32 b) {
    if (groups[a] != groups[b]) return groups[a] < groups[b];
    const i64 at = first_difference(a, b);
    if (at < lengths[a] && at < lengths[b]) {
      return tokens[starts[a] + at] < tokens[starts[b] + at];
    }
    return lengths[a] != lengths[b] ? lengths[a] < lengths[b] : a < b;
  });
  out.shared.assign(starts.size, 0);
  for (i64 k = 1; k < starts.size; ++k) {
    const i32 before = out.order[k - 1];
    const i32 after = out.order[k];
    if (groups[before] == groups[after]) out.shared[k] = first_difference(before, after);
  }
  return out;
}

}  // namespace binac

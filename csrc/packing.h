// Packing core: C++17, no Python, no torch. Errors are exceptions that name the argument.
//
// Every function has a twin of the same name in megatron_binac/packing_reference.py with the same
// result bit for bit: inside, integers decide everything and every tie is broken by index.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace binac {

// Largest room of a bin in multiples of seq_multiple (one list head each), and most bins of a plan.
constexpr std::int64_t kMaxRoom = std::int64_t{1} << 24;
constexpr std::int64_t kMaxBins = std::int64_t{1} << 26;
// Units times sets up to which plain largest differencing, quadratic in both, is tried as well.
constexpr std::int64_t kSmall = std::int64_t{1} << 17;
// Partial fillings that are looked at to complete one bin.
constexpr int kBinSearch = 128;

// A vector that somebody else owns.
template <typename T>
struct View {
  const T* data = nullptr;
  std::int64_t size = 0;
  const T& operator[](std::int64_t i) const { return data[i]; }
};

struct Plan {
  std::vector<std::int32_t> indices;  // sequences, rank after rank, micro-batch after micro-batch
  std::vector<std::int64_t> bounds;   // dp_size * num_microbatches + 1 offsets into indices
  std::vector<std::int64_t> tokens;   // of each micro-batch, every sequence padded
  std::vector<std::int64_t> costs;    // of each micro-batch, in units of the quantised costs
  std::int64_t num_bins = 0;          // before counts were made equal
  std::int64_t lower_bound = 0;       // on num_bins
};

// Sequences to micro-batches of every rank. `units` (labels of what stays together) and `ranks` may be
// empty; `limit` is the room of a micro-batch, a multiple of seq_multiple.
Plan plan(View<std::int64_t> lengths, View<double> costs, View<std::int64_t> units,
          View<std::int32_t> ranks, std::int64_t limit, std::int64_t dp_size,
          std::int64_t seq_multiple, std::int64_t microbatch_multiple);

// One sequence's share of a micro-batch. Null stands for "none": no prompt, all of loss_mask true.
struct Source {
  View<std::int32_t> prompt;
  View<std::int32_t> ids;
  const bool* loss_mask = nullptr;       // as long as ids
  std::int32_t index = 0;           // written to sample_ids
  std::int64_t length = 0;               // tokens kept
  std::int64_t start = 0;                // place in the buffers
  std::int64_t stop = 0;
};

// A per-token field: rows as long as ids, or (rows empty) one value for each source.
struct Field {
  std::vector<const float*> rows;
  std::vector<float> values;
  float* out = nullptr;
};

struct Buffers {
  std::int64_t* tokens = nullptr;
  std::int64_t* labels = nullptr;
  std::int64_t* position_ids = nullptr;
  bool* loss_mask = nullptr;
  std::int32_t* sample_ids = nullptr;
};

// Fill the buffers of one micro-batch in one pass. num_threads 0 lets the size decide.
void gather(const std::vector<Source>& sources, const std::vector<Field>& fields,
            const Buffers& out, std::int64_t pad_id, std::int64_t ignore_id, int num_threads);

// Copy counts[k] items of item_size bytes from starts[k] of values to out_starts[k] of out.
void scatter(const std::byte* values, std::int64_t num_values, View<std::int64_t> starts,
             View<std::int64_t> counts, std::byte* out, std::int64_t num_out,
             View<std::int64_t> out_starts, std::size_t item_size, int num_threads);

struct PrefixOrder {
  std::vector<std::int32_t> order;   // by group, then lexicographic
  std::vector<std::int64_t> shared;  // leading tokens equal to those of the one before in its group
};

PrefixOrder sort_by_prefix(View<std::int64_t> tokens, View<std::int64_t> starts,
                           View<std::int64_t> lengths, View<std::int64_t> groups);

}  // namespace binac

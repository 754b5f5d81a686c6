// NumPy on one side, csrc/packing.h on the other: checks what memory safety needs (type, layout, size),
// then works without the GIL. megatron_binac/packing.py checks the rest before it comes here.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "packing.h"

namespace py = pybind11;
using binac::View;
using std::int32_t;
using std::int64_t;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

template <typename T>
const char* type_name();
template <>
const char* type_name<int32_t>() { return "int32"; }
template <>
const char* type_name<int64_t>() { return "int64"; }
template <>
const char* type_name<double>() { return "float64"; }
template <>
const char* type_name<float>() { return "float32"; }
template <>
const char* type_name<bool>() { return "bool"; }

template <typename T>
bool is_vector(const py::handle& value) {
  return Array<T>::check_(value) && py::reinterpret_borrow<py::array>(value).ndim() == 1;
}

template <typename T>
[[noreturn]] void refuse(const std::string& name, const py::handle& value) {
  std::string got = py::str(py::type::of(value)).cast<std::string>();
  if (py::isinstance<py::array>(value)) {
    const auto array = py::reinterpret_borrow<py::array>(value);
    got = py::str(static_cast<py::object>(array.dtype())).cast<std::string>() + " with " +
          std::to_string(array.ndim()) + " dimensions" +
          ((array.flags() & py::array::c_style) ? "" : ", strided");
  }
  throw std::invalid_argument(name + ": expected a contiguous vector of " + type_name<T>() +
                              ", got " + got + "; np.ascontiguousarray(..., dtype='" +
                              type_name<T>() + "') makes one");
}

// The array behind `value`, never a converted copy of it.
template <typename T>
Array<T> vector(const std::string& name, const py::handle& value) {
  if (!is_vector<T>(value)) refuse<T>(name, value);
  return py::reinterpret_borrow<Array<T>>(value);
}

template <typename T>
View<T> view(const Array<T>& array) {
  return {array.data(), static_cast<int64_t>(array.size())};
}

// A buffer to write, of exactly `size` values.
template <typename T>
T* buffer(const std::string& name, const py::handle& value, int64_t size) {
  Array<T> array = vector<T>(name, value);
  if (array.size() != size) {
    throw std::invalid_argument(name + ": got a buffer of " + std::to_string(array.size()) +
                                " values, expected " + std::to_string(size));
  }
  if (!array.writeable()) throw std::invalid_argument(name + ": expected a writeable buffer");
  return array.mutable_data();
}

template <typename T>
Array<T> to_numpy(std::vector<T> values) {
  auto* owned = new std::vector<T>(std::move(values));
  py::capsule free_it(owned, [](void* p) { delete static_cast<std::vector<T>*>(p); });
  return Array<T>(static_cast<py::ssize_t>(owned->size()), owned->data(), free_it);
}

// Rows of one type: a Ragged (one buffer with offsets) or a sequence of arrays.
template <typename T>
class Rows {
 public:
  Rows(std::string name, const py::object& rows) : name_(std::move(name)) {
    if (py::hasattr(rows, "offsets")) {
      values_ = vector<T>(name_, rows.attr("values"));
      offsets_ = vector<int64_t>(name_, rows.attr("offsets"));
      size_ = static_cast<int64_t>(offsets_.size()) - 1;
      ragged_ = true;
    } else {
      if (!py::isinstance<py::sequence>(rows)) {
        throw std::invalid_argument(name_ + ": expected a list of arrays or a Ragged");
      }
      sequence_ = rows;
      size_ = static_cast<int64_t>(py::len(rows));
    }
  }

  // `length` >= 0: what the row has to have.
  View<T> row(int64_t index, int64_t length = -1) {
    if (index < 0 || index >= size_) {
      throw std::invalid_argument("indices: got " + std::to_string(index) + ", but " + name_ +
                                  " has " + std::to_string(size_) + " rows");
    }
    View<T> out;
    if (ragged_) {
      const int64_t begin = offsets_.data()[index];
      const int64_t end = offsets_.data()[index + 1];
      if (begin < 0 || end < begin || end > values_.size()) {
        throw std::invalid_argument(name_ + ": row " + std::to_string(index) +
                                    " has offsets outside the values");
      }
      out = {values_.data() + begin, end - begin};
    } else {
      const py::object value = sequence_[py::int_(index)];
      if (!is_vector<T>(value)) refuse<T>(name_ + ": row " + std::to_string(index), value);
      kept_.push_back(py::reinterpret_borrow<Array<T>>(value));
      out = view(kept_.back());
    }
    if (length >= 0 && out.size != length) {
      throw std::invalid_argument(name_ + ": row " + std::to_string(index) + " has " +
                                  std::to_string(out.size) + " values, expected " +
                                  std::to_string(length) + ", as many as ids");
    }
    return out;
  }

 private:
  std::string name_;
  py::object sequence_;
  Array<T> values_;
  Array<int64_t> offsets_;
  bool ragged_ = false;
  int64_t size_ = 0;
  std::vector<Array<T>> kept_;  // rows stay alive while the GIL is away
};

py::tuple plan(const py::object& lengths_S, const py::object& costs_S, const py::object& units_S,
               const py::object& ranks_S, int64_t limit, int64_t dp_size, int64_t seq_multiple,
               int64_t microbatch_multiple) {
  const auto lengths = vector<int64_t>("lengths", lengths_S);
  const auto costs = vector<double>("costs", costs_S);
  Array<int64_t> units;
  Array<int32_t> ranks;
  View<int64_t> units_view;
  View<int32_t> ranks_view;
  if (!units_S.is_none()) {
    units = vector<int64_t>("units", units_S);
    units_view = view(units);
  }
  if (!ranks_S.is_none()) {
    ranks = vector<int32_t>("ranks", ranks_S);
    ranks_view = view(ranks);
  }
  binac::Plan out;
  {
    const auto lengths_view = view(lengths);
    const auto costs_view = view(costs);
    py::gil_scoped_release no_gil;
    out = binac::plan(lengths_view, costs_view, units_view, ranks_view, limit, dp_size,
                      seq_multiple, microbatch_multiple);
  }
  return py::make_tuple(to_numpy(std::move(out.indices)), to_numpy(std::move(out.bounds)),
                        to_numpy(std::move(out.tokens)), to_numpy(std::move(out.costs)),
                        out.num_bins, out.lower_bound);
}

void gather(const py::object& prompts, const py::object& ids, const py::object& loss_mask,
            const py::sequence& fields, const py::sequence& names, const py::object& indices_s,
            const py::object& lengths_s, const py::object& starts_s, int64_t pad_id,
            int64_t ignore_id, const py::object& tokens_T, const py::object& labels_T,
            const py::object& position_ids_T, const py::object& loss_mask_T,
            const py::object& sample_ids_T, const py::sequence& fields_T, int num_threads) {
  const auto indices = vector<int32_t>("indices", indices_s);
  const auto lengths = vector<int64_t>("lengths", lengths_s);
  const auto starts = vector<int64_t>("starts", starts_s);
  const int64_t num = indices.size();
  if (lengths.size() != num || starts.size() != num + 1) {
    throw std::invalid_argument("starts: expected one value more than indices and lengths");
  }
  const int64_t total = starts.data()[num];
  for (int64_t k = 0; k < num; ++k) {
    if (starts.data()[k] < 0 || starts.data()[k] > starts.data()[k + 1]) {
      throw std::invalid_argument("starts: expected ascending values");
    }
  }
  binac::Buffers out;
  out.tokens = buffer<int64_t>("tokens", tokens_T, total);
  out.labels = buffer<int64_t>("labels", labels_T, total);
  out.position_ids = buffer<int64_t>("position_ids", position_ids_T, total);
  out.loss_mask = buffer<bool>("loss_mask buffer", loss_mask_T, total);
  out.sample_ids = buffer<int32_t>("sample_ids", sample_ids_T, total);

  Rows<int32_t> id_rows("ids", ids);
  Rows<int32_t> prompt_rows("prompts", prompts.is_none() ? py::list() : prompts);
  Rows<bool> mask_rows("loss_mask", loss_mask.is_none() ? py::list() : loss_mask);
  std::vector<binac::Source> sources(num);
  for (int64_t k = 0; k < num; ++k) {
    binac::Source& source = sources[k];
    source.index = indices.data()[k];
    source.ids = id_rows.row(source.index);
    if (!prompts.is_none()) source.prompt = prompt_rows.row(source.index);
    if (!loss_mask.is_none()) {
      source.loss_mask = mask_rows.row(source.index, source.ids.size).data;
    }
    source.length = lengths.data()[k];
    source.start = starts.data()[k];
    source.stop = starts.data()[k + 1];
  }

  if (py::len(names) != py::len(fields) || py::len(fields_T) != py::len(fields)) {
    throw std::invalid_argument("fields: expected as many names and buffers as fields");
  }
  std::vector<binac::Field> specs(py::len(fields));
  std::vector<Rows<float>> kept;
  kept.reserve(specs.size());
  for (std::size_t f = 0; f < specs.size(); ++f) {
    const auto name = names[f].cast<std::string>();
    const py::object field = fields[f];
    specs[f].out = buffer<float>(name + " buffer", fields_T[f], total);
    if (py::isinstance<py::array>(field)) {
      const auto values = vector<float>(name, field);
      for (const auto& source : sources) {
        if (source.index >= values.size()) {
          throw std::invalid_argument(name + ": got " + std::to_string(values.size()) +
                                      " values, but indices has " + std::to_string(source.index));
        }
        specs[f].values.push_back(values.data()[source.index]);
      }
    } else {
      kept.emplace_back(name, field);
      for (const auto& source : sources) {
        specs[f].rows.push_back(kept.back().row(source.index, source.ids.size).data);
      }
    }
  }
  py::gil_scoped_release no_gil;
  binac::gather(sources, specs, out, pad_id, ignore_id, num_threads);
}

void scatter(const py::array& values_T, const py::object& starts_s, const py::object& counts_s,
             py::array out, const py::object& out_starts_s, int num_threads) {
  const auto starts = vector<int64_t>("starts", starts_s);
  const auto counts = vector<int64_t>("counts", counts_s);
  const auto out_starts = vector<int64_t>("out_starts", out_starts_s);
  const bool flat = values_T.ndim() == 1 && out.ndim() == 1 &&
                    (values_T.flags() & py::array::c_style) && (out.flags() & py::array::c_style);
  if (!flat || !values_T.dtype().equal(out.dtype()) || values_T.dtype().kind() == 'O') {
    throw std::invalid_argument("values: expected a contiguous vector of the output's type");
  }
  const auto item = static_cast<std::size_t>(out.itemsize());
  const auto* from = static_cast<const std::byte*>(values_T.data());
  auto* to = static_cast<std::byte*>(out.mutable_data());
  const int64_t num_values = values_T.size();
  const int64_t num_out = out.size();
  const auto starts_view = view(starts);
  const auto counts_view = view(counts);
  const auto out_starts_view = view(out_starts);
  py::gil_scoped_release no_gil;
  binac::scatter(from, num_values, starts_view, counts_view, to, num_out, out_starts_view, item,
                 num_threads);
}

py::tuple sort_by_prefix(const py::object& tokens_T, const py::object& starts_S,
                         const py::object& lengths_S, const py::object& groups_S) {
  const auto tokens = vector<int64_t>("tokens", tokens_T);
  const auto starts = vector<int64_t>("starts", starts_S);
  const auto lengths = vector<int64_t>("lengths", lengths_S);
  const auto groups = vector<int64_t>("groups", groups_S);
  const auto tokens_view = view(tokens);
  const auto starts_view = view(starts);
  const auto lengths_view = view(lengths);
  const auto groups_view = view(groups);
  binac::PrefixOrder out;
  {
    py::gil_scoped_release no_gil;
    out = binac::sort_by_prefix(tokens_view, starts_view, lengths_view, groups_view);
  }
  return py::make_tuple(to_numpy(std::move(out.order)), to_numpy(std::move(out.shared)));
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "C++ twin of megatron_binac.packing_reference; call it through megatron_binac.packing.";
  m.def("plan", &plan);
  m.def("gather", &gather);
  m.def("scatter", &scatter);
  m.def("sort_by_prefix", &sort_by_prefix);
}

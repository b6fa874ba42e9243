// The cache operators of polyspec/kv_cache.hpp for torch's dispatcher, on the LibTorch stable ABI
// (target 2.11).
//
// Caches are inputs and outputs, as the schemas say. Checks here cover memory safety: kinds, shapes
// and strides. No tensor's value is read on the host; errors in the data come back as status bits.
#include <algorithm>
#include <tuple>
#include <vector>

#include "polyspec/kv_cache.hpp"
#include "stable.hpp"

namespace {

using namespace bindings;

// Most appends are a few kilobytes: below this many tasks a thread is not worth waking.
constexpr int64_t kGrain = 16;

void expect_vectors(const Tensor& tensor, const char* name, const Tensor& like) {
  STD_TORCH_CHECK(tensor.dim() == 4, name, ": expected 4 dimensions, got ", tensor.dim());
  STD_TORCH_CHECK(tensor.size(3) <= 1 || tensor.stride(3) == 1, name,
                  ": expected unit stride in the last dimension, got ", tensor.stride(3));
  STD_TORCH_CHECK(dtype_of(tensor) == dtype_of(like), name,
                  ": expected the dtype of the cache's keys");
  STD_TORCH_CHECK(Place(tensor) == Place(like), name,
                  ": expected a tensor on the device of the cache");
}

template <class Rows>
Rows rows_of(const Tensor& tensor) {
  Rows rows;
  if constexpr (std::is_same_v<Rows, polyspec::KvCache>) {
    rows.data = tensor.mutable_data_ptr();
  } else {
    rows.data = tensor.const_data_ptr();
  }
  for (int axis = 0; axis < 3; ++axis) rows.stride[axis] = tensor.stride(axis);
  return rows;
}

using Appended = std::tuple<Tensor, Tensor>;

// Fills all of NewTokens but the outputs, and checks new keys and values against a cache of `heads`
// heads.
polyspec::NewTokens new_tokens(const Tensor& cache_keys, const Tensor& cache_values,
                               const Tensor& keys, const Tensor& values, const Tensor& lengths,
                               const OptTensor& counts) {
  const Place place(cache_keys);
  expect_vectors(cache_keys, "cache_keys", cache_keys);
  expect_vectors(cache_values, "cache_values", cache_keys);
  expect_unexpanded(cache_keys, "cache_keys");
  expect_unexpanded(cache_values, "cache_values");
  expect_vectors(keys, "keys", cache_keys);
  expect_vectors(values, "values", cache_keys);
  polyspec::NewTokens in;
  in.batch = keys.size(0);
  in.heads = cache_keys.size(1);
  in.tokens = keys.size(2);
  in.key_dim = cache_keys.size(3);
  in.value_dim = cache_values.size(3);
  in.element_size = static_cast<int32_t>(cache_keys.element_size());
  expect(cache_values, "cache_values", place,
         {cache_keys.size(0), in.heads, cache_keys.size(2), in.value_dim});
  expect(keys, "keys", place, {in.batch, in.heads, in.tokens, in.key_dim});
  expect(values, "values", place, {in.batch, in.heads, in.tokens, in.value_dim});
  in.keys = rows_of<polyspec::KvSource>(keys);
  in.values = rows_of<polyspec::KvSource>(values);
  in.lengths = integers<int64_t>(lengths, "lengths", place, {in.batch});
  in.counts = integers(counts, "counts", place, {in.batch});
  return in;
}

Appended outputs(polyspec::NewTokens& in, const Place& place) {
  Appended made{empty(place, {in.batch}, aoti_torch_dtype_int64()),
                empty(place, {in.batch}, aoti_torch_dtype_int32())};
  in.new_lengths = static_cast<int64_t*>(std::get<0>(made).mutable_data_ptr());
  in.status = static_cast<int32_t*>(std::get<1>(made).mutable_data_ptr());
  return made;
}

Appended append(const Tensor& cache_keys, const Tensor& cache_values, const Tensor& new_keys,
                const Tensor& new_values, const Tensor& lengths, const OptTensor& counts, bool ring,
                int64_t sinks) {
  const Tensor keys = unexpanded(new_keys), values = unexpanded(new_values);
  polyspec::AppendParams params;
  params.in = new_tokens(cache_keys, cache_values, keys, values, lengths, counts);
  STD_TORCH_CHECK(cache_keys.size(0) == params.in.batch, "keys: expected size ", cache_keys.size(0),
                  " in dimension 0, got ", params.in.batch);
  params.capacity = cache_keys.size(2);
  params.ring = ring;
  params.sinks = sinks;
  params.keys = rows_of<polyspec::KvCache>(cache_keys);
  params.values = rows_of<polyspec::KvCache>(cache_values);
  const Place place(cache_keys);
  Appended made = outputs(params.in, place);
  run<kGrain>(&polyspec::append, params, place);
  return made;
}

Appended append_paged(const Tensor& cache_keys, const Tensor& cache_values,
                      const Tensor& block_table, const Tensor& new_keys, const Tensor& new_values,
                      const Tensor& lengths, const OptTensor& counts) {
  const Tensor keys = unexpanded(new_keys), values = unexpanded(new_values);
  polyspec::PagedAppendParams params;
  params.in = new_tokens(cache_keys, cache_values, keys, values, lengths, counts);
  const Place place(cache_keys);
  STD_TORCH_CHECK(block_table.dim() == 2, "block_table: expected 2 dimensions, got ",
                  block_table.dim());
  params.pages = cache_keys.size(0);
  params.page_size = cache_keys.size(2);
  params.max_pages = block_table.size(1);
  params.block_table =
      integers<int32_t>(block_table, "block_table", place, {params.in.batch, params.max_pages});
  params.block_table_stride = params.max_pages;
  params.keys = rows_of<polyspec::KvCache>(cache_keys);
  params.values = rows_of<polyspec::KvCache>(cache_values);
  Appended made = outputs(params.in, place);
  run<kGrain>(&polyspec::append_paged, params, place);
  return made;
}

Tensor pages(polyspec::Result (*op)(const polyspec::PagesParams&, polyspec::Stream),
             const Tensor& block_table, const Tensor& held, const Tensor& free_pages,
             const Tensor& free_count, const Tensor& lengths, int64_t page_size) {
  const Place place(block_table);
  STD_TORCH_CHECK(block_table.dim() == 2, "block_table: expected 2 dimensions, got ",
                  block_table.dim());
  STD_TORCH_CHECK(free_pages.dim() == 1, "free_pages: expected 1 dimension, got ",
                  free_pages.dim());
  polyspec::PagesParams params;
  params.batch = block_table.size(0);
  params.max_pages = block_table.size(1);
  params.pages = free_pages.size(0);
  params.page_size = page_size;
  params.block_table =
      integers<int32_t>(block_table, "block_table", place, {params.batch, params.max_pages});
  params.block_table_stride = params.max_pages;
  params.held = integers<int64_t>(held, "held", place, {params.batch});
  params.free_pages = integers<int32_t>(free_pages, "free_pages", place, {params.pages});
  params.free_count = integers<int64_t>(free_count, "free_count", place, {1});
  params.lengths = integers<int64_t>(lengths, "lengths", place, {params.batch});
  const Tensor status = empty(place, {params.batch}, aoti_torch_dtype_int32());
  params.status = static_cast<int32_t*>(status.mutable_data_ptr());
  run<kGrain>(op, params, place);
  return status;
}

Tensor reserve_pages(const Tensor& block_table, const Tensor& held, const Tensor& free_pages,
                     const Tensor& free_count, const Tensor& lengths, int64_t page_size) {
  return pages(&polyspec::reserve_pages, block_table, held, free_pages, free_count, lengths,
               page_size);
}

Tensor truncate_pages(const Tensor& block_table, const Tensor& held, const Tensor& free_pages,
                      const Tensor& free_count, const Tensor& lengths, int64_t page_size) {
  return pages(&polyspec::truncate_pages, block_table, held, free_pages, free_count, lengths,
               page_size);
}

void update_lengths(Tensor lengths, OptTensor base, const OptTensor& most, const OptTensor& counts,
                    int64_t tokens, const OptTensor& above, const OptTensor& first,
                    OptTensor rest) {
  const Place place(lengths);
  STD_TORCH_CHECK(lengths.dim() == 1, "lengths: expected 1 dimensions, got ", lengths.dim());
  polyspec::LengthsParams params;
  params.batch = lengths.size(0);
  params.tokens = tokens;
  params.lengths = integers<int64_t>(lengths, "lengths", place, {params.batch});
  if (base.has_value()) params.base = integers<int64_t>(*base, "base", place, {params.batch});
  params.most = integers(most, "most", place, {params.batch});
  params.counts = integers(counts, "counts", place, {params.batch});
  params.above = integers(above, "above", place, {params.batch});
  params.first = integers(first, "first", place, {params.batch});
  if (rest.has_value()) params.rest = integers<int64_t>(*rest, "rest", place, {3, params.batch});
  run<1>(&polyspec::update_lengths, params, place);
}

// Row j of batch row b, of n elements.
void expect_rows(const Tensor& rows, const char* name) {
  STD_TORCH_CHECK(rows.dim() == 2 || rows.dim() == 3, name, ": expected 2 or 3 dimensions, got ",
                  rows.dim());
  if (rows.dim() == 3) expect_unit_stride(rows, name);
}

polyspec::CopyRowsParams copied_rows(const Tensor& from, const Tensor& to, const OptTensor& at,
                                     const OptTensor& less) {
  expect_rows(from, "from");
  expect_rows(to, "to");
  const Place place(from);
  polyspec::CopyRowsParams params;
  params.batch = from.size(0);
  const int64_t size = static_cast<int64_t>(from.element_size());
  params.bytes = size * (from.dim() == 3 ? from.size(2) : 1);
  if (to.dim() == 3) {
    expect(to, "to", place, {params.batch, to.size(1), from.dim() == 3 ? from.size(2) : -1});
  } else {
    expect(to, "to", place, {params.batch, to.size(1)});
    STD_TORCH_CHECK(from.dim() == 2, "to: expected 3 dimensions, got 2");
  }
  expect_dtype(to, "to", dtype_of(from));
  params.at = integers(at, "at", place, {params.batch});
  params.less = integers(less, "less", place, {params.batch});
  params.from = from.const_data_ptr();
  params.to = to.mutable_data_ptr();
  for (int axis = 0; axis < 2; ++axis) {
    params.from_stride[axis] = from.stride(axis) * size;
    params.to_stride[axis] = to.stride(axis) * size;
  }
  return params;
}

Tensor take_rows(const Tensor& rows, const OptTensor& at, const OptTensor& less, int64_t plus,
                 int64_t width, bool ring) {
  expect_rows(rows, "rows");
  const Place place(rows);
  STD_TORCH_CHECK(width >= 0, "width: expected >= 0, got ", width);
  const Tensor made = rows.dim() == 3
                          ? empty(place, {rows.size(0), width, rows.size(2)}, dtype_of(rows))
                          : empty(place, {rows.size(0), width}, dtype_of(rows));
  polyspec::CopyRowsParams params = copied_rows(rows, made, at, less);
  params.plus = plus;
  params.width = width;
  params.slots = rows.size(1);
  params.ring = ring;
  run<kGrain>(&polyspec::copy_rows, params, place);
  return made;
}

void put_rows(Tensor ring, const Tensor& rows, const OptTensor& at, const OptTensor& less,
              int64_t plus, const OptTensor& part, const OptTensor& skip, const OptTensor& lowest,
              OptTensor begin, OptTensor end, const OptTensor& kept) {
  const Place place(ring);
  expect_unexpanded(ring, "ring");
  polyspec::CopyRowsParams params = copied_rows(rows, ring, at, less);
  const int64_t batch = params.batch;
  params.plus = plus;
  params.width = rows.size(1);
  params.slots = ring.size(1);
  params.ring = params.put = true;
  params.part = integers(part, "part", place, {batch});
  params.skip = integers(skip, "skip", place, {batch});
  if (lowest.has_value()) {  // a column of the state rows
    expect(*lowest, "lowest", place, {batch});
    expect_dtype(*lowest, "lowest", aoti_torch_dtype_int64());
    params.lowest = static_cast<const int64_t*>(lowest->const_data_ptr());
    params.lowest_stride = lowest->stride(0);
  }
  if (begin.has_value()) params.begin = integers<int64_t>(*begin, "begin", place, {batch});
  if (end.has_value()) params.end = integers<int64_t>(*end, "end", place, {batch});
  params.kept = integers(kept, "kept", place, {batch});
  run<kGrain>(&polyspec::copy_rows, params, place);
}

// `pointers` [2, l] holds the data pointers of the keys and the values, on their device, so that no
// call has to copy them there. The lists name the written tensors, and give shape and strides.
Appended compact_tree(std::vector<Tensor> keys, std::vector<Tensor> values, const Tensor& pointers,
                      const Tensor& lengths, const Tensor& path) {
  STD_TORCH_CHECK(!keys.empty() && keys.size() == values.size(),
                  "keys, values: expected as many of each, at least one; got ", keys.size(),
                  " and ", values.size());
  const Tensor& key = keys.front();
  const Tensor& value = values.front();
  const Place place(key);
  const int64_t layers = static_cast<int64_t>(keys.size());
  polyspec::CompactTreeParams params;
  params.layers = layers;
  params.batch = key.size(0);
  params.heads = key.size(1);
  params.capacity = key.size(2);
  params.key_dim = key.size(3);
  params.value_dim = value.size(3);
  params.element_size = static_cast<int32_t>(key.element_size());
  STD_TORCH_CHECK(path.dim() == 2, "path: expected 2 dimensions, got ", path.dim());
  params.path_len = path.size(1);
  params.path = integers<int64_t>(path, "path", place, {params.batch, params.path_len});
  params.lengths = integers<int64_t>(lengths, "lengths", place, {params.batch});
  int64_t* bases = integers<int64_t>(pointers, "pointers", place, {2, layers});
  for (int axis = 0; axis < 3; ++axis) {
    params.key_stride[axis] = key.stride(axis);
    params.value_stride[axis] = value.stride(axis);
  }
  uintptr_t all = 16;
  for (int64_t layer = 0; layer < layers; ++layer) {
    const Tensor& k = keys[static_cast<size_t>(layer)];
    const Tensor& v = values[static_cast<size_t>(layer)];
    expect_vectors(k, "keys", key);
    expect_vectors(v, "values", key);
    expect_unexpanded(k, "keys");
    expect_unexpanded(v, "values");
    expect(k, "keys", place, {params.batch, params.heads, params.capacity, params.key_dim});
    expect(v, "values", place, {params.batch, params.heads, params.capacity, params.value_dim});
    for (int axis = 0; axis < 3; ++axis) {
      STD_TORCH_CHECK(k.stride(axis) == key.stride(axis) && v.stride(axis) == value.stride(axis),
                      "keys, values: expected the same strides in every layer");
    }
    const auto k_base = reinterpret_cast<uintptr_t>(k.mutable_data_ptr());
    const auto v_base = reinterpret_cast<uintptr_t>(v.mutable_data_ptr());
    all |= k_base | v_base;
    STD_TORCH_CHECK(place.cuda() || (static_cast<uintptr_t>(bases[layer]) == k_base &&
                                     static_cast<uintptr_t>(bases[layers + layer]) == v_base),
                    "pointers: expected the data pointers of keys and values; layer ", layer,
                    " differs");
  }
  params.alignment = static_cast<int32_t>(all & (~all + 1));
  params.keys = reinterpret_cast<void* const*>(bases);
  params.values = params.keys + layers;
  Appended made{empty(place, {params.batch}, aoti_torch_dtype_int64()),
                empty(place, {params.batch}, aoti_torch_dtype_int32())};
  params.new_lengths = static_cast<int64_t*>(std::get<0>(made).mutable_data_ptr());
  params.status = static_cast<int32_t*>(std::get<1>(made).mutable_data_ptr());
  run<kGrain>(&polyspec::compact_tree, params, place);
  return made;
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(polyspec, m) {
  m.def(
      "append(Tensor(a!) cache_keys, Tensor(b!) cache_values, Tensor keys, Tensor values, Tensor "
      "lengths, "
      "Tensor? counts, bool ring, int sinks) -> (Tensor new_lengths, Tensor status)");
  m.def(
      "append_paged(Tensor(a!) cache_keys, Tensor(b!) cache_values, Tensor block_table, Tensor "
      "keys, Tensor values, "
      "Tensor lengths, Tensor? counts) -> (Tensor new_lengths, Tensor status)");
  m.def(
      "reserve_pages(Tensor(a!) block_table, Tensor(b!) held, Tensor(c!) free_pages, Tensor(d!) "
      "free_count, "
      "Tensor lengths, int page_size) -> Tensor");
  m.def(
      "truncate_pages(Tensor(a!) block_table, Tensor(b!) held, Tensor(c!) free_pages, Tensor(d!) "
      "free_count, "
      "Tensor lengths, int page_size) -> Tensor");
  m.def(
      "update_lengths(Tensor(a!) lengths, Tensor(b!)? base, Tensor? most, Tensor? counts, "
      "int tokens, Tensor? above=None, Tensor? first=None, Tensor(c!)? rest=None) -> ()");
  m.def(
      "take_rows(Tensor rows, Tensor? at, Tensor? less, int plus, int width, bool ring) -> Tensor");
  m.def(
      "put_rows(Tensor(a!) ring, Tensor rows, Tensor? at, Tensor? less, int plus, Tensor? part, "
      "Tensor? skip, Tensor? lowest, Tensor(b!)? begin, Tensor(c!)? end, Tensor? kept) -> ()");
  m.def(
      "compact_tree(Tensor(a!)[] keys, Tensor(b!)[] values, Tensor pointers, Tensor lengths, "
      "Tensor path) "
      "-> (Tensor new_lengths, Tensor status)");
}

STABLE_TORCH_LIBRARY_IMPL(polyspec, CPU, m) {
  m.impl("append", TORCH_BOX(&append));
  m.impl("append_paged", TORCH_BOX(&append_paged));
  m.impl("reserve_pages", TORCH_BOX(&reserve_pages));
  m.impl("truncate_pages", TORCH_BOX(&truncate_pages));
  m.impl("update_lengths", TORCH_BOX(&update_lengths));
  m.impl("take_rows", TORCH_BOX(&take_rows));
  m.impl("put_rows", TORCH_BOX(&put_rows));
  m.impl("compact_tree", TORCH_BOX(&compact_tree));
}

STABLE_TORCH_LIBRARY_IMPL(polyspec, CUDA, m) {
  m.impl("append", TORCH_BOX(&append));
  m.impl("append_paged", TORCH_BOX(&append_paged));
  m.impl("reserve_pages", TORCH_BOX(&reserve_pages));
  m.impl("truncate_pages", TORCH_BOX(&truncate_pages));
  m.impl("update_lengths", TORCH_BOX(&update_lengths));
  m.impl("take_rows", TORCH_BOX(&take_rows));
  m.impl("put_rows", TORCH_BOX(&put_rows));
  m.impl("compact_tree", TORCH_BOX(&compact_tree));
}

// Every operator of a CUDA call reaches the CUDA backend of this build: with kernels and no device
// the launch fails, without kernels the answer is kUnsupported. Skipped (77) where there is a
// device: cuda_test.cpp runs the kernels there, and the memory here is the host's.
#include <cstdio>

#include "cuda/launch.hpp"
#include "polyspec/kv_cache.hpp"
#include "polyspec/round_state.hpp"
#include "polyspec/verify_tree.hpp"
#include "support/check.hpp"

namespace {

using polyspec::Result;
using polyspec::Stream;

#ifdef POLYSPEC_WITH_CUDA
constexpr Result::Code kWanted = Result::Code::kCudaError;
#else
constexpr Result::Code kWanted = Result::Code::kUnsupported;
#endif

void expect(const char* name, const Result& result) {
  std::printf("%-16s %s\n", name, result.message);
  CHECK_EQ(static_cast<int>(kWanted), static_cast<int>(result.code));
}

int64_t words[256];
int32_t numbers[64];
float floats[64];

polyspec::NewTokens new_tokens() {
  polyspec::NewTokens in;
  in.batch = in.heads = in.tokens = in.key_dim = in.value_dim = 1;
  in.element_size = 4;
  in.keys.data = in.values.data = floats;
  in.lengths = words;
  in.new_lengths = words + 1;
  in.status = numbers;
  return in;
}

void test_caches(const Stream& stream) {
  polyspec::AppendParams append;
  append.in = new_tokens();
  append.capacity = 1;
  append.keys.data = append.values.data = floats + 1;
  expect("append", polyspec::append(append, stream));

  polyspec::PagedAppendParams paged;
  paged.in = new_tokens();
  paged.pages = paged.page_size = paged.max_pages = paged.block_table_stride = 1;
  paged.keys.data = paged.values.data = floats + 1;
  paged.block_table = numbers + 1;
  expect("append_paged", polyspec::append_paged(paged, stream));

  polyspec::PagesParams pages;
  pages.batch = pages.pages = pages.page_size = pages.max_pages = pages.block_table_stride = 1;
  pages.lengths = words;
  pages.block_table = numbers;
  pages.held = words + 1;
  pages.free_pages = numbers + 1;
  pages.free_count = words + 2;
  pages.status = numbers + 2;
  expect("reserve_pages", polyspec::reserve_pages(pages, stream));
  expect("truncate_pages", polyspec::truncate_pages(pages, stream));

  polyspec::LengthsParams lengths;
  lengths.batch = 1;
  lengths.lengths = words;
  expect("update_lengths", polyspec::update_lengths(lengths, stream));

  polyspec::CopyRowsParams rows;
  rows.batch = rows.width = rows.slots = 1;
  rows.bytes = 4;
  rows.from = floats;
  rows.to = floats + 1;
  expect("copy_rows", polyspec::copy_rows(rows, stream));

  void* bases[2] = {floats, floats + 1};
  polyspec::CompactTreeParams tree;
  tree.layers = tree.batch = tree.heads = tree.capacity = tree.key_dim = tree.value_dim = 1;
  tree.element_size = 4;
  tree.keys = bases;
  tree.values = bases + 1;
  tree.lengths = words;
  tree.new_lengths = words + 1;
  tree.status = numbers;
  expect("compact_tree", polyspec::compact_tree(tree, stream));
}

void test_schedules(const Stream& stream) {
  polyspec::ScheduleDueParams due;
  due.in.shape.levels = 2;
  due.in.shape.capacity = due.in.shape.steps = 1;
  due.in.batch = 1;
  due.in.state = words;
  due.due = words + 60;
  expect("schedule_due", polyspec::schedule_due(due, stream));

  polyspec::ScheduleNextParams next;
  next.in = due.in;
  next.level = 1;
  next.width = 1;
  next.input_ids = words + 64;
  next.plan = words + 66;
  expect("schedule_next", polyspec::schedule_next(next, stream));

  polyspec::ScheduleReportParams report;
  report.in = next.in;
  report.level = 1;
  report.plan = words + 66;
  report.width = 1;
  report.tokens = words + 80;
  report.counts = words + 81;
  report.status = numbers;
  report.appended = words + 82;
  expect("schedule_report", polyspec::schedule_report(report, stream));
}

void test_tree(const Stream& stream) {
  polyspec::VerifyTreeParams tree;
  tree.batch = tree.vocab = 1;
  tree.target_logits = tree.logprobs = floats;
  tree.tokens = tree.num_accepted = tree.rows = words;
  tree.status = numbers;
  expect("verify_tree", polyspec::verify_tree(tree, stream));
}

}  // namespace

int main() {
  if (polyspec::cuda::available()) return 77;
  const Stream stream = Stream::on(nullptr);
  test_caches(stream);
  test_tree(stream);
  test_schedules(stream);
  return 0;
}

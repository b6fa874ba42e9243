// Workspaces for verify on CUDA: slices of one arena per device, zeroed once. Eager calls of a
// stream share a slice, since they follow each other; a captured call has a separate slice until
// its graph is gone, since graphs may be replayed on any stream. Where none is left, which torch
// warns of once, or the arena would have to be allocated during a capture, calls run without a
// workspace: slower for the smallest batches, with the same results.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "polyspec/capture.hpp"
#include "polyspec/verify.hpp"
#include "slices.hpp"
#include "stable.hpp"

namespace bindings {

class Workspaces {
 public:
  // The workspace for a call on the stream, 16-byte aligned, or nullptr.
  static void* lend(const Place& place, polyspec::Stream stream) {
    static Workspaces& all = *new Workspaces;  // graphs may outlive objects destroyed at exit
    return polyspec::is_capturing(stream) ? all.of_graph(place, stream)
                                          : all.of_stream(place, stream);
  }

 private:
  static constexpr int64_t kSlices = 128;

  struct Loan {
    Slices* slices;
    void* slice;
  };

  void* of_stream(const Place& place, polyspec::Stream stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    void*& mine = streams_[{place.device_index, stream.cuda}];
    if (mine != nullptr) return mine;
    const auto [arena, asked_first] = arenas_.try_emplace(place.device_index);
    if (asked_first) arena->second = make(place, stream);
    if (arena->second != nullptr) mine = lend_of(arena->second.get());
    return mine;
  }

  void* of_graph(const Place& place, polyspec::Stream stream) {
    Slices* slices = nullptr;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto arena = arenas_.find(place.device_index);
      if (arena != arenas_.end()) slices = arena->second.get();
    }
    void* const mine = slices == nullptr ? nullptr : lend_of(slices);
    if (mine == nullptr) return nullptr;
    auto loan = std::make_unique<Loan>(Loan{slices, mine});
    // Without a notice of the graph's end the slice is never returned.
    if (polyspec::when_graph_goes(stream, &give_back, loan.get()).ok()) loan.release();
    return mine;
  }

  static void* lend_of(Slices* slices) {
    static std::atomic<bool> warned{false};
    void* const mine = slices->lend();
    if (mine == nullptr && !warned.exchange(true)) {
      aoti_torch_warn(
          __func__, __FILE__, __LINE__,
          "polyspec: all workspaces of this CUDA device are lent to streams and captured "
          "graphs; further verifications do without and are slower for small batches");
    }
    return mine;
  }

  static void give_back(void* argument) {
    const std::unique_ptr<Loan> loan(static_cast<Loan*>(argument));
    loan->slices->give_back(loan->slice);
  }

  // From torch's allocator, and never freed: graphs may hold on to slices. nullptr: it could not be
  // zeroed.
  static std::unique_ptr<Slices> make(const Place& place, polyspec::Stream stream) {
    const int64_t bytes = kSlices * polyspec::kVerifyWorkspaceBytes;
    const int64_t size = bytes / 8;
    const int64_t stride = 1;
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_int64(),
                                                    place.device_type, place.device_index,
                                                    &handle));
    const Tensor* const kept = new Tensor(handle);
    void* const memory = kept->mutable_data_ptr();
    if (!polyspec::clear_workspace(memory, bytes, stream).ok()) return nullptr;
    return std::make_unique<Slices>(static_cast<char*>(memory), kSlices,
                                    polyspec::kVerifyWorkspaceBytes);
  }

  std::mutex mutex_;
  std::map<int32_t, std::unique_ptr<Slices>> arenas_;          // by device; asked for once
  std::map<std::pair<int32_t, CUstream_st*>, void*> streams_;  // by device and stream
};

}  // namespace bindings

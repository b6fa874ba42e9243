// Workspaces for verify on CUDA: slices of one arena per device, zeroed once. Eager calls of a
// stream share a slice, since they follow each other; a captured call gets one of its own for good,
// since graphs may be replayed on any stream. Where none is left, or the arena would have to be
// made during a capture, calls do without: they are slower for the smallest batches and give the
// same.
#pragma once

#include <map>
#include <mutex>
#include <utility>

#include "polyspec/verify.hpp"
#include "stable.hpp"

namespace bindings {

class Workspaces {
 public:
  // The workspace for a call on the stream, 16-byte aligned, or nullptr.
  static void* lend(const Place& place, polyspec::Stream stream) {
    static Workspaces all;
    const std::lock_guard<std::mutex> lock(all.mutex_);
    return all.slice(place, stream);
  }

 private:
  static constexpr int64_t kSlices = 128;

  struct Arena {
    bool asked_for = false;
    char* memory = nullptr;
    int64_t used = 0;  // slices
  };

  void* slice(const Place& place, polyspec::Stream stream) {
    const bool capturing = polyspec::is_capturing(stream);
    if (!capturing) {
      const auto mine = of_stream_.find({place.device_index, stream.cuda});
      if (mine != of_stream_.end()) return mine->second;
    }
    Arena& arena = arenas_[place.device_index];
    if (!arena.asked_for && !capturing) make(place, stream, &arena);
    if (arena.memory == nullptr || arena.used == kSlices) return nullptr;
    void* const made = arena.memory + arena.used++ * polyspec::kVerifyWorkspaceBytes;
    if (!capturing) of_stream_[{place.device_index, stream.cuda}] = made;
    return made;
  }

  // From torch's allocator, and never given back: graphs may hold on to slices.
  static void make(const Place& place, polyspec::Stream stream, Arena* arena) {
    arena->asked_for = true;
    const int64_t bytes = kSlices * polyspec::kVerifyWorkspaceBytes;
    const int64_t size = bytes / 8;
    const int64_t stride = 1;
    AtenTensorHandle handle = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_int64(),
                                                    place.device_type, place.device_index,
                                                    &handle));
    const Tensor* const kept = new Tensor(handle);
    void* const memory = kept->mutable_data_ptr();
    if (polyspec::clear_workspace(memory, bytes, stream).ok())
      arena->memory = static_cast<char*>(memory);
  }

  std::mutex mutex_;
  std::map<int32_t, Arena> arenas_;                              // by device
  std::map<std::pair<int32_t, CUstream_st*>, void*> of_stream_;  // by device and stream
};

}  // namespace bindings

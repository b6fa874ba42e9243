// Helpers of the operators' bindings: tensors of the LibTorch stable ABI (target 2.11), where a
// call runs, and torch's threads.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#ifdef POLYSPEC_CUDA_ON_CPU
#include <cuda_runtime_api.h>
#endif

#include <initializer_list>
#include <optional>
#include <string>

#include "polyspec/status.hpp"
#include "polyspec/types.hpp"

// Lives in libtorch_cuda, which a CPU build of torch does not have; then the address is null. torch
// 2.11 and all later releases offer it for the current stream.
extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace bindings {

using torch::stable::Tensor;
using OptTensor = std::optional<Tensor>;

// Where a call runs, read off its main tensor; every other tensor must be there too.
struct Place {
  int32_t device_type = 0;
  int32_t device_index = 0;

  explicit Place(const Tensor& tensor) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device_type));
    device_index = tensor.get_device_index();
  }
  bool operator==(const Place& other) const {
    return device_type == other.device_type && device_index == other.device_index;
  }
  // In the tests' build of the module (csrc/tests/cuda_on_cpu) the host is the device.
#ifdef POLYSPEC_CUDA_ON_CPU
  bool cuda() const { return true; }
#else
  bool cuda() const { return device_type == aoti_torch_device_type_cuda(); }
#endif
};

inline int32_t dtype_of(const Tensor& tensor) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tensor.get(), &dtype));
  return dtype;
}

// In messages.
inline const char* dtype_name(int32_t dtype) {
  if (dtype == aoti_torch_dtype_float32()) return "float32";
  if (dtype == aoti_torch_dtype_bfloat16()) return "bfloat16";
  if (dtype == aoti_torch_dtype_float16()) return "float16";
  if (dtype == aoti_torch_dtype_float64()) return "float64";
  if (dtype == aoti_torch_dtype_int32()) return "int32";
  if (dtype == aoti_torch_dtype_int16()) return "int16";
  if (dtype == aoti_torch_dtype_int8()) return "int8";
  if (dtype == aoti_torch_dtype_uint8()) return "uint8";
  if (dtype == aoti_torch_dtype_bool()) return "bool";
  return dtype == aoti_torch_dtype_int64() ? "int64" : "another dtype";
}

inline void expect_dtype(const Tensor& tensor, const char* name, int32_t wanted) {
  const int32_t own = dtype_of(tensor);
  STD_TORCH_CHECK(own == wanted, name, ": expected ", dtype_name(wanted), ", got ",
                  dtype_name(own));
}

// A tensor's shape in messages.
inline std::string shape_name(const Tensor& tensor) {
  std::string made = "[";
  for (int64_t axis = 0; axis < tensor.dim(); ++axis)
    made += (axis ? ", " : "") + std::to_string(tensor.size(axis));
  return made + "]";
}

inline polyspec::DType float_type(const Tensor& tensor, const char* name) {
  const int32_t dtype = dtype_of(tensor);
  if (dtype == aoti_torch_dtype_float32()) return polyspec::DType::kFloat32;
  if (dtype == aoti_torch_dtype_bfloat16()) return polyspec::DType::kBFloat16;
  STD_TORCH_CHECK(dtype == aoti_torch_dtype_float16(), name,
                  ": expected float32, bfloat16 or float16, got ", dtype_name(dtype));
  return polyspec::DType::kFloat16;
}

// Of operators that do not compute in float16.
inline polyspec::DType wide_float_type(const Tensor& tensor, const char* name) {
  const int32_t dtype = dtype_of(tensor);
  STD_TORCH_CHECK(dtype == aoti_torch_dtype_float32() || dtype == aoti_torch_dtype_bfloat16(), name,
                  ": expected float32 or bfloat16");
  return float_type(tensor, name);
}

// The shape a tensor must have, and that it is where the call runs.
inline void expect(const Tensor& tensor, const char* name, const Place& place,
                   std::initializer_list<int64_t> shape) {
  STD_TORCH_CHECK(Place(tensor) == place, name, ": expected a tensor on the device of the others");
  STD_TORCH_CHECK(tensor.dim() == static_cast<int64_t>(shape.size()), name, ": expected ",
                  shape.size(), " dimensions, got ", tensor.dim());
  int64_t axis = 0;
  for (const int64_t size : shape) {
    STD_TORCH_CHECK(tensor.size(axis) == size, name, ": expected size ", size, " in dimension ",
                    axis, ", got ", tensor.size(axis));
    ++axis;
  }
}

inline void expect_unit_stride(const Tensor& tensor, const char* name) {
  const int64_t last = tensor.dim() - 1;
  // (The strides of a tensor without elements mean nothing, and numpy's are 0.)
  STD_TORCH_CHECK(tensor.size(last) <= 1 || tensor.stride(last) == 1 || tensor.numel() == 0, name,
                  ": expected unit stride in the last dimension, got ", tensor.stride(last));
}

// A tensor to read, with a copy instead of an expanded one: the core takes a stride of 0 for one
// that was left out.
inline Tensor unexpanded(const Tensor& tensor) {
  for (int64_t axis = 0; axis + 1 < tensor.dim(); ++axis)
    if (tensor.size(axis) > 1 && tensor.stride(axis) == 0) return torch::stable::contiguous(tensor);
  return tensor;
}

// Of a tensor that is written to.
inline void expect_unexpanded(const Tensor& tensor, const char* name) {
  for (int64_t axis = 0; axis < tensor.dim(); ++axis)
    STD_TORCH_CHECK(tensor.size(axis) < 2 || tensor.stride(axis) != 0, name,
                    ": expected memory for each element, got an expanded tensor");
}

// A matrix without overlapping rows, which expanded matrices have: a copy where rows might overlap.
inline Tensor rows_apart(const Tensor& matrix) {
  const bool apart = matrix.size(0) < 2 || matrix.stride(0) >= matrix.size(1);
  return apart ? matrix : torch::stable::contiguous(matrix);
}

// Data of a contiguous tensor of int64 or int32.
template <class T>
T* integers(const Tensor& tensor, const char* name, const Place& place,
            std::initializer_list<int64_t> shape) {
  expect(tensor, name, place, shape);
  expect_dtype(tensor, name, sizeof(T) == 8 ? aoti_torch_dtype_int64() : aoti_torch_dtype_int32());
  STD_TORCH_CHECK(tensor.is_contiguous(), name, ": expected a contiguous tensor");
  return static_cast<T*>(tensor.mutable_data_ptr());
}
inline const int64_t* integers(const OptTensor& tensor, const char* name, const Place& place,
                               std::initializer_list<int64_t> shape) {
  return tensor.has_value() ? integers<int64_t>(*tensor, name, place, shape) : nullptr;
}

// Data of a contiguous tensor of that shape, and of the dtype of the call's x.
inline const void* contiguous_data(const Tensor& tensor, const char* name, const Place& place,
                                   std::initializer_list<int64_t> shape, int32_t dtype) {
  expect(tensor, name, place, shape);
  STD_TORCH_CHECK(dtype_of(tensor) == dtype, name, ": expected the dtype of x");
  STD_TORCH_CHECK(tensor.is_contiguous(), name, ": expected a contiguous tensor");
  return tensor.const_data_ptr();
}

inline void expect_uint8(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(dtype_of(tensor) == aoti_torch_dtype_uint8() && tensor.is_contiguous(), name,
                  ": expected a contiguous tensor of uint8");
}

// A new contiguous tensor of one to four dimensions.
inline Tensor empty(const Place& place, std::initializer_list<int64_t> shape, int32_t dtype) {
  int64_t strides[4] = {1, 1, 1, 1};
  const int64_t rank = static_cast<int64_t>(shape.size());
  for (int64_t axis = rank - 2; axis >= 0; --axis)
    strides[axis] = strides[axis + 1] * shape.begin()[axis + 1];
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(rank, shape.begin(), strides, dtype,
                                                  place.device_type, place.device_index, &made));
  return Tensor(made);
}

// An executor on torch's threads, so that torch.set_num_threads holds for the core too. A thread
// gets at least kGrain tasks.
template <int64_t kGrain>
void run_on_torch_threads(void*, int64_t n, polyspec::Executor::Body body, void* context) {
  struct Work {
    polyspec::Executor::Body body;
    void* context;
  } work{body, context};
  const auto range = [](int64_t begin, int64_t end, void* opaque) {
    const Work& mine = *static_cast<const Work*>(opaque);
    for (int64_t i = begin; i < end; ++i) mine.body(mine.context, i);
  };
  TORCH_ERROR_CODE_CHECK(torch_parallel_for(0, n, kGrain, range, &work));
}

// How many threads that executor has.
inline int64_t threads() {
  uint32_t count = 1;
  TORCH_ERROR_CODE_CHECK(torch_get_num_threads(&count));
  return count;
}

inline void require(const polyspec::Result& result) {
  STD_TORCH_CHECK(result.ok(), "polyspec: ", result.message);
}

#ifdef POLYSPEC_CUDA_ON_CPU
struct DeviceGuard {
  explicit DeviceGuard(int32_t) {}
};

inline polyspec::Stream current_stream(const Place&) { return polyspec::Stream::on(nullptr); }

// torch reads the outputs as soon as the call returns.
template <class Params>
void run_on_cuda(polyspec::Result (*op)(const Params&, polyspec::Stream), const Params& params,
                 const Place& place) {
  require(op(params, current_stream(place)));
  STD_TORCH_CHECK(cudaStreamSynchronize(nullptr) == cudaSuccess, "polyspec: the stand-in failed");
}
#else
using torch::stable::accelerator::DeviceGuard;

// The stream that calls on a CUDA tensor's device go to.
inline polyspec::Stream current_stream(const Place& place) {
  void* stream = nullptr;
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                  "polyspec: this torch has no CUDA, yet got a CUDA tensor");
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(place.device_index, &stream));
  return polyspec::Stream::on(static_cast<CUstream_st*>(stream));
}

template <class Params>
void run_on_cuda(polyspec::Result (*op)(const Params&, polyspec::Stream), const Params& params,
                 const Place& place) {
  const DeviceGuard guard(place.device_index);
  require(op(params, current_stream(place)));
}
#endif

// Runs an operator that has no other backend.
template <int64_t kGrain, class Params>
void run_on_cpu(polyspec::Result (*op)(const Params&, polyspec::Stream), const Params& params) {
  require(op(params, polyspec::Stream::cpu({run_on_torch_threads<kGrain>, nullptr})));
}

// Runs an operator of the core on the tensors' device and torch's current stream.
template <int64_t kGrain, class Params>
void run(polyspec::Result (*op)(const Params&, polyspec::Stream), const Params& params,
         const Place& place) {
  if (place.cuda())
    run_on_cuda(op, params, place);
  else
    run_on_cpu<kGrain>(op, params);
}

}  // namespace bindings

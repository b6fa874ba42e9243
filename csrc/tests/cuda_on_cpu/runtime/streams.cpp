#include "streams.hpp"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>

#include "fault.hpp"
#include "scheduler.hpp"

struct StandInUserObject {
  StandInUserObject(void* argument, void (*release)(void*))
      : argument(argument), release(release) {}
  StandInUserObject(const StandInUserObject&) = delete;
  StandInUserObject& operator=(const StandInUserObject&) = delete;
  ~StandInUserObject() { release(argument); }
  void* argument;
  void (*release)(void*);
};

struct StandInGraph {
  std::vector<std::shared_ptr<stand_in::Launch>> launches;
  std::vector<std::shared_ptr<StandInUserObject>> objects;
};

namespace stand_in {

struct Stream {
  std::deque<std::shared_ptr<Launch>> launches;  // launches that have not ended
  bool capturing = false;
  StandInGraph captured;
  race::Context context = race::make_unwatched_context();
  char clock;  // of all that has ended
};

namespace {

std::map<cudaStream_t, Stream> streams;  // and the default stream: nullptr
std::map<const void*, size_t> allowed;   // dynamic shared memory, by kernel
int64_t submitted = 0;

bool any_captures() {
  return std::any_of(streams.begin(), streams.end(),
                     [](const auto& entry) { return entry.second.capturing; });
}

void submit(Stream& stream, std::shared_ptr<Launch> launch) {
  ++submitted;
  launch->stream = &stream;
  if (launch->dependent && !stream.launches.empty()) launch->before = stream.launches.back();
  race::release(&launch->submitted);
  launch->order.resize(launch->clusters);
  for (uint64_t i = 0; i < launch->clusters; ++i) {
    launch->order[i] = i;
    std::swap(launch->order[i], launch->order[draw() % (i + 1)]);
  }
  stream.launches.push_back(std::move(launch));
}

// As on a device a capture forbids it.
cudaError_t synchronize() {
  if (any_captures()) return cudaErrorStreamCaptureUnsupported;
  run_all();
  for (const auto& entry : streams) race::acquire(&entry.second.clock);
  return cudaSuccess;
}

}  // namespace

int64_t launches_so_far() { return submitted; }
race::Context context_of(const Stream& stream) { return stream.context; }

std::vector<std::shared_ptr<Launch>> beginning_launches() {
  std::vector<std::shared_ptr<Launch>> launches;
  for (auto& [handle, stream] : streams) {
    const race::Context host = race::current_context();
    const auto next = std::find_if(stream.launches.begin(), stream.launches.end(),
                                   [](const auto& launch) { return !launch->all_begun(); });
    if (next == stream.launches.end()) continue;
    const std::shared_ptr<Launch>& launch = *next;
    if (next != stream.launches.begin() && !(launch->dependent && launch->before->all_released()))
      continue;
    if (launch->begun == 0 && !launch->dependent) {
      race::switch_to(stream.context);
      race::acquire(&launch->submitted);
      race::switch_to(host);
    }
    launches.push_back(launch);
  }
  return launches;
}

void end_launches(Stream& stream) {
  while (!stream.launches.empty() && stream.launches.front()->all_ended()) {
    race::acquire(&stream.launches.front()->end);
    stream.launches.front()->before.reset();
    stream.launches.pop_front();
    race::release(&stream.clock);
  }
}

unsigned ctas_of_cluster(const cudaLaunchConfig_t& config) {
  unsigned ctas = 1;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) ctas = attribute.val.clusterDim.x;
  }
  return ctas;
}

bool is_dependent(const cudaLaunchConfig_t& config) {
  return std::any_of(config.attrs, config.attrs + config.numAttrs, [](const auto& attribute) {
    return attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization &&
           attribute.val.programmaticStreamSerializationAllowed != 0;
  });
}

cudaError_t allow_dynamic(const void* function, size_t bytes, size_t most) {
  if (bytes > most) return cudaErrorInvalidValue;
  allowed[function] = bytes;
  return cudaSuccess;
}

cudaError_t launch(const cudaLaunchConfig_t& config, std::function<void()> thread,
                   const char* kernel, const void* function) {
  const race::Unwatched bookkeeping;
  auto launch = std::make_shared<Launch>();
  launch->thread = std::move(thread);
  launch->kernel = kernel;
  launch->grid = config.gridDim;
  launch->threads = config.blockDim.x;
  launch->ctas = ctas_of_cluster(config);
  launch->dynamic = config.dynamicSmemBytes;
  launch->dependent = is_dependent(config);
  if (launch->dynamic > std::max(kStaticMemory, allowed[function])) return cudaErrorInvalidValue;
  const dim3& grid = launch->grid;
  if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffff || grid.y > 65535 ||
      grid.z > 65535 || config.blockDim.y != 1 || config.blockDim.z != 1 || launch->threads == 0 ||
      launch->threads > kMaxThreads || launch->ctas == 0 || launch->ctas > kMaxClusterCtas ||
      grid.x % launch->ctas != 0) {
    return cudaErrorInvalidConfiguration;
  }
  if (launch->threads % kLanes != 0) fault("a CTA has part of a warp");
  launch->clusters = uint64_t{grid.x} / launch->ctas * grid.y * grid.z;
  Stream& stream = streams[config.stream];
  if (stream.capturing) {
    stream.captured.launches.push_back(std::move(launch));
  } else {
    submit(stream, std::move(launch));
  }
  return cudaSuccess;
}

}  // namespace stand_in

struct CUstream_st {
  char unused;
};

using stand_in::streams;

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = new CUstream_st;
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  return cudaStreamCreate(stream);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  const cudaError_t error = cudaStreamSynchronize(stream);
  if (error != cudaSuccess) return error;
  streams.erase(stream);
  delete stream;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t) { return stand_in::synchronize(); }
cudaError_t cudaDeviceSynchronize() { return stand_in::synchronize(); }

cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(stand_in::kLanes);
  config.stream = stream;
  const auto set = [=] {
    if (stand_in::thread_index().x == 0) std::memset(memory, value, bytes);
  };
  return stand_in::launch(config, set, "memset");
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status = streams[stream].capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long*, cudaGraph_t* graph, const void*,
                                     const void*, size_t*) {
  *graph = &streams[stream].captured;
  return cudaStreamIsCapturing(stream, status);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  streams[stream].capturing = true;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  stand_in::Stream& captured = streams[stream];
  if (!captured.capturing) return cudaErrorInvalidValue;
  *graph = new StandInGraph(std::move(captured.captured));
  captured.captured = {};
  captured.capturing = false;
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                 unsigned long long) {
  *executable = new StandInGraph(*graph);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  const stand_in::race::Unwatched bookkeeping;
  for (const auto& captured : executable->launches) {
    const auto launch = std::make_shared<stand_in::Launch>(*captured);
    if (captured == executable->launches.front()) launch->dependent = false;  // its graph is not
    stand_in::submit(streams[stream], launch);
  }
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t* object, void* argument, void (*release)(void*),
                                 unsigned references, unsigned) {
  if (references != 1) return cudaErrorNotSupported;
  *object = new StandInUserObject(argument, release);
  return cudaSuccess;
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object,
                                      unsigned references, unsigned flags) {
  if (references != 1 || flags != cudaGraphUserObjectMove) return cudaErrorNotSupported;
  graph->objects.emplace_back(object);
  return cudaSuccess;
}

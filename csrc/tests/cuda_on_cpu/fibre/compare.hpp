// Random calls over a group of fibres against the CPU backend, which runs them over a group of one:
// equal to the last byte of the poisoned outputs. Define POLYSPEC_CORE before including this.
#pragma once

#include <string>

#include "core/sample_request.hpp"
#include "core/verify_request.hpp"
#include "core/verify_tree_request.hpp"
#include "cuda_on_cpu/fibre/fibre_machine.hpp"
#include "support/check.hpp"
#include "support/random_indexed.hpp"
#include "support/random_indexed_tree.hpp"

namespace polyspec::POLYSPEC_CORE {

template <class Group>
void request(Group& group, const SampleParams& params, int64_t b) {
  switch (params.dtype) {
    case DType::kFloat32:
      return sample_request<float>(group, params, b);
    case DType::kBFloat16:
      return sample_request<BFloat16>(group, params, b);
    case DType::kFloat16:
      return sample_request<Float16>(group, params, b);
  }
}

template <class Group>
void request(Group& group, const VerifyParams& params, int64_t b) {
  switch (params.target_dtype) {
    case DType::kFloat32:
      return verify_request<float>(group, params, b);
    case DType::kBFloat16:
      return verify_request<BFloat16>(group, params, b);
    case DType::kFloat16:
      return verify_request<Float16>(group, params, b);
  }
}

template <class Group>
void request(Group& group, const VerifyTreeParams& params, int64_t b) {
  switch (params.target_dtype) {
    case DType::kFloat32:
      return verify_tree_request<float>(group, params, b);
    case DType::kBFloat16:
      return verify_tree_request<BFloat16>(group, params, b);
    case DType::kFloat16:
      return verify_tree_request<Float16>(group, params, b);
  }
}

inline Result on_cpu(const VerifyTreeParams& params) { return verify_tree(params); }
inline Result on_cpu(const SampleParams& params) { return sample(params); }
inline Result on_cpu(const VerifyParams& params) { return verify(params); }

// A random call and what the CPU backend makes of it.
template <class Case>
class Expected {
 public:
  Expected(uint64_t seed, int64_t forced_vocab, const std::string& kind)
      : call_(seed, forced_vocab),
        outputs_(call_.outputs.bytes),
        name_(kind + " case " + std::to_string(seed) + ", vocabulary " +
              std::to_string(call_.vocab)) {
    CHECK(on_cpu(call_.params(call_.inputs.bytes.data(), outputs_.data())).ok());
  }

  // Runs the call with the groups that make_group(rank) gives. As on a GPU, one group takes all
  // requests in turn, with what the last one left in its scratch.
  template <class MakeGroup>
  void check(fibre::Machine& machine, MakeGroup make_group) const {
    check_run(machine, [&](int rank, const auto& params) {
      auto group = make_group(rank);
      for (int64_t b = 0; b < params.batch; ++b) request(group, params, b);
    });
  }

  // Runs the call as body(rank, params).
  template <class Body>
  void check_run(fibre::Machine& machine, Body body) const {
    std::vector<unsigned char> got = call_.outputs.bytes;
    const auto params = call_.params(call_.inputs.bytes.data(), got.data());
    machine.run([&](int rank) { body(rank, params); });
    cases::check_same(outputs_, got,
                      name_ + ", " + std::to_string(machine.size()) + " threads in teams of " +
                          std::to_string(machine.lanes()));
  }

  const Case& call() const { return call_; }

 private:
  Case call_;
  std::vector<unsigned char> outputs_;
  std::string name_;
};

}  // namespace polyspec::POLYSPEC_CORE

// Errors: the result of a call, and the status bits of a request.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>

namespace polyspec {

// Result of a call, known on the host when the call returns. Operators never throw, and are
// re-entrant: any number of threads may call them at once, on memory that the calls do not write in
// common. Of classes one object is for one thread at a time.
struct Result {
  enum class Code : int32_t {
    kOk = 0,
    kInvalidArgument = 1,  // a pointer, size or enum is wrong; nothing was written
    kUnsupported = 2,      // this build lacks the backend
    kCudaError = 3,        // the launch failed; `message` is CUDA's text
  };
  Code code = Code::kOk;
  // "name: expected ..., given ..."; empty when all is well. It lives as long as the result.
  char message[188] = "";

  bool ok() const { return code == Code::kOk; }

  // A message that is too long is cut.
  static Result failure(Code code, const char* format, va_list arguments) {
    Result out;
    out.code = code;
    std::vsnprintf(out.message, sizeof out.message, format, arguments);
    return out;
  }
};

// Status of one request (contract C4), a bit set of int32. 0: all is well.
//
// An error bit (below kStatusNotes) stops the request at row num_accepted, hence at that offset
// from its position: tokens from there on are -1. Under the token rule the tokens before it are
// kept; under the block rule, which needs the whole block to verify any of it, none is kept and all
// are -1. A note (kStatusNotes and above) reports a rounding corner that was handled; the tokens
// are good.
enum StatusBits : int32_t {
  kStatusNan = 1 << 0,              // a NaN in a row of logits
  kStatusInf = 1 << 1,              // +inf in a row of logits: no distribution exists
  kStatusEmptyRow = 1 << 2,         // every logit is -inf: nothing has probability
  kStatusDraftRow = 1 << 3,         // set with the bits above when the row is the draft's
  kStatusTokenOutOfRange = 1 << 4,  // a draft token is not in [0, vocab)
  kStatusBadLength = 1 << 5,        // a draft length is not in [0, draft_len]
  kStatusBadParameter = 1 << 6,     // temperature, top-k, top-p, min-p, position ... out of range
  // A draft token has probability 0 under the distribution it came with, or that distribution
  // cannot be its row's.
  kStatusDraftStatisticsMismatch = 1 << 7,
  kStatusBadIndex = 1 << 8,  // a slot, an offset or a draft row's id is out of range
  // A node's parent does not come before it, deterministic children of one parent are equal, or a
  // path is longer than `depth`.
  kStatusBadTree = 1 << 9,
  kStatusNotes = 1 << 16,
  kStatusZeroResidual = 1 << 16,  // rejected, but the residual rounds to zero: drawn from p itself
};

}  // namespace polyspec

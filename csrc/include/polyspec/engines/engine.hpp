// The interface of a chain to the program that runs its models: read tokens, show rows of logits,
// forget the end of the text. An engine for another inference library is one file like llama.hpp.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>

namespace polyspec {

// How a call ended. No engine and no chain throws.
struct Outcome {
  enum class Code : int32_t {
    kOk = 0,
    kInvalidArgument = 1,  // an argument is out of its range; nothing was done
    kNoRoom = 2,           // the context cannot hold so many tokens
    kAborted = 3,          // requested by the engine's abort callback
    kEngine = 4,           // the engine failed
    kNoDistribution = 5,   // a row of logits has no distribution, or a sampling parameter is wrong
  };
  Code code = Code::kOk;
  char message[240] = "";  // empty when all is well

  bool ok() const { return code == Code::kOk; }

  static Outcome failure(Code code, const char* format, ...) __attribute__((format(printf, 2, 3))) {
    Outcome out;
    out.code = code;
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(out.message, sizeof out.message, format, arguments);
    va_end(arguments);
    return out;
  }
};

// One sequence of one language model, with its state after the tokens read.
class Engine {
 public:
  virtual ~Engine() = default;

  virtual int64_t vocab_size() const noexcept = 0;  // v, in [1, 2^31)
  virtual int64_t max_length() const noexcept = 0;  // tokens that the context holds
  virtual int64_t length() const noexcept = 0;      // tokens read and not forgotten

  // Reads tokens [count], count >= 1, after the tokens read so far, and keeps the logits of the
  // last `rows` of them, 0 <= rows <= count. After a failure a prefix of length() tokens is read,
  // and decoding can go on from there.
  virtual Outcome decode(const int64_t* tokens, int64_t count, int64_t rows) noexcept = 0;

  // [rows, v] of the last decode: the last of them is the distribution of the token after all
  // tokens read. Valid until the next decode.
  virtual const float* logits() const noexcept = 0;

  // Forgets the tokens from index `length` on, 0 <= length <= length(). Where the state cannot go
  // back exactly there, it goes back further: length() is the number of tokens left, at most
  // `length`, and the chain reads the rest again.
  virtual void truncate(int64_t length) noexcept = 0;
};

// A drafter without a distribution: it names tokens outright, as a lookup in the text does.
class Proposer {
 public:
  virtual ~Proposer() = default;
  // Writes at most `most` tokens that may follow text [length], and returns how many.
  virtual int64_t propose(const int64_t* text, int64_t length, int64_t most,
                          int64_t* tokens) noexcept = 0;
};

}  // namespace polyspec

// polyspec::verify: verify a drafted block against the target's logits and emit accepted tokens.
#pragma once

#include "polyspec/export.h"
#include "polyspec/sample.hpp"

namespace polyspec {

// Why a text ends: a bit set.
enum EndedBits : int64_t {
  kEndedEos = 1 << 0,   // the last emitted token is one of the request's `eos`
  kEndedRoom = 1 << 1,  // as many tokens were emitted as there was room for
};

// The end of a request's text, and the first tokens of its next pass. Cuts follow the verification,
// so that the emitted tokens are a prefix of the tokens without cuts, and keep the target's
// distribution. After a cut tokens are -1, log-probabilities NaN and distributions zero;
// num_accepted counts the draft tokens before it; an error or note of a later row is not reported.
// A request with room 0 is not verified: nothing of it is read and its status is 0.
struct CutParams {
  const int64_t* eos = nullptr;  // [b, e] ids that end a text (and are kept); -1 is no id
  int64_t eos_count = 0;         // e
  int64_t eos_stride = 0;        // elements per request; 0: one list for all
  PerRequest<int64_t> room{nullptr, INT64_MAX};  // >= 0; most tokens that may be emitted

  // Outputs, [b] each, nullptr where not wanted. Of n emitted tokens a are accepted draft tokens:
  int64_t* num_emitted = nullptr;  // n, in [0, k+1]
  int64_t* ended = nullptr;        // EndedBits; 0: the text goes on
  // position + a: the tokens that a cache may keep after reading the block. One less where no row
  // follows the last accepted draft token.
  int64_t* cache_lengths = nullptr;
  int64_t* next_ids = nullptr;        // the last emitted token, the next pass's input; -1 if n = 0
  int64_t* next_positions = nullptr;  // its absolute position, position + n - 1; -1 if n = 0
};

// Row i of the target's logits is the distribution of the token after i draft tokens, so row i
// verifies draft token i and row `length`, if present, gives the bonus token. With p, q the
// processed distributions of target and draft:
//   rule token: accept y while u < p(y)/q(y); at the first rejection draw from norm(max(p - q, 0));
//   rule block: p_i = min(1, p_{i-1} p(y_i)/q(y_i)),  S_i = sum_x max(p_i p(x) - q(x), 0),
//               h_i = S_i / (S_i + 1 - p_i), h_m = p_m; keep the largest i with u_i < h_i, then
//               draw from norm(max(p_i p - q, 0)), or the bonus from p when the whole block is
//               accepted.
// A row i > 0 of the target without a token of any probability ends the block before it: h_i = p_i.
// It is an error, kStatusEmptyRow, if the tokens before it are accepted.
// Either way the emitted tokens have exactly the target's distribution. Without draft logits q is
// one-hot at the draft token (a deterministic proposal).
//
// The arithmetic, in float64 and in this order, with m and M a row's masses and their sum
// (RowStatistics):
//   p(y)/q(y) = (m_p(y) M_q) / (m_q(y) M_p), or m_p(y) / M_p for a deterministic proposal;
//   u = ((bits >> 12) + 0.5) 2^-52, strictly between 0 and 1, of kAccept (philox.hpp);
//   max(c p - q, 0), c = 1 or p_i, is drawn from by rejection first, which reads the rows at one
//     token only: try j = 0, ..., kResidualTries - 1 draws x from p as `sample` does, and x is
//     emitted if u m_p(x) (c / M_p) < m_p(x) (c / M_p) - m_q(x) (1 / M_q); both draws are kTry;
//     where none succeeds it has the integer masses trunc(2^S max(0, m_p(x) (c / M_p) - m_q(x) (1 /
//     M_q))), from which the token is drawn as `sample` draws from m (kEmit). Where all are 0 the
//     token is drawn from p: kStatusZeroResidual. S_i is their sum / 2^S.
// So the emitted tokens have the distribution that `sample` draws from to within about 2^-S v +
// 1e-15 of total variation for each token.
//
// Nothing has to be copied side by side for a call:
//   draft_rows  draft rows lie anywhere in a pool: the rows of a draft model, or the rows of logits
//               that the level below has verified with. Each draft token names the row that it was
//               drawn from, or -1: a deterministic proposal. Kinds may be mixed within a block.
//   slots       the parameters of a request lie at its slot of longer arrays.
//   offsets     the target's rows of all requests follow one another, without gaps.
// The results are, bit for bit, the same as with the rows laid out as [b, k+1, v] and [b, k, vd].
struct VerifyParams {
  int64_t batch = 0;        // b
  int64_t draft_len = 0;    // k >= 0
  int64_t vocab = 0;        // v, in [1, 2^31)
  int64_t draft_vocab = 0;  // vd, in [1, v]; ids past it have q = 0. Ignored without draft logits

  DType target_dtype = DType::kFloat32;
  // [b, k+1, v], or [num_rows, v] with `offsets`; unit stride along v
  const void* target_logits = nullptr;
  int64_t target_stride[2] = {0, 0};  // elements per request (not with `offsets`), per row

  // [b, k+1, ceil(v / 32)], or [num_rows, ceil(v / 32)] with `offsets`: allowed ids of each row of
  // the target, as of `sample`; draft rows are not masked. nullptr: all are allowed.
  const int32_t* allowed = nullptr;
  int64_t allowed_stride[2] = {0, 0};  // words per request (not with `offsets`), per row

  DType draft_dtype = DType::kFloat32;
  // [b, k, vd], or the pool [num_draft_rows, vd] with `draft_rows`; nullptr: deterministic proposal
  const void* draft_logits = nullptr;
  int64_t draft_stride[2] = {0, 0};  // elements per request (not with `draft_rows`), per row
  // Rows of the pool by draft token, laid out as draft_tokens are: [b, k], or [num_rows] with
  // `offsets`. In [0, num_draft_rows), or -1: this token's proposal was deterministic. Another id
  // is kStatusBadIndex. nullptr: there is no pool.
  const int64_t* draft_rows = nullptr;
  int64_t draft_rows_stride = 0;  // entries per request (not with `offsets`)
  int64_t num_draft_rows = 0;
  // [b, k], or [num_draft_rows] with `draft_rows`; contiguous, as `sample` and `verify` gave them
  // for the same rows and sampling parameters; nullptr: computed here. Checked without a pass over
  // a row: that the distribution is finite, gives the draft token a probability and has a mass that
  // a row can have (kStatusDraftStatisticsMismatch). Another row's distribution may pass; the
  // tokens then do not have the target's distribution, though none has probability 0 under it.
  const RowStatistics* draft_statistics = nullptr;
  // [v] draft id of each target id, -1: none. nullptr: identity
  const int32_t* target_to_draft = nullptr;

  // [b, k] target ids, or [num_rows] with `offsets`: entry offsets[i] + j is draft token j of
  // request i. Entries past a length are not read.
  const int64_t* draft_tokens = nullptr;
  int64_t draft_tokens_stride = 0;  // elements per request (not with `offsets`)
  // [b] in [0, k]; with `offsets` also at most a request's rows. nullptr: k for every request, with
  // `offsets` one less than its rows. Another length is kStatusBadLength.
  const int64_t* draft_lengths = nullptr;

  // [b+1]: request i has the target's rows offsets[i] ... offsets[i+1]-1. Rows after row `length`
  // are not read. A request with as many draft tokens as rows has no bonus: if all are accepted,
  // no token follows them. An offset that is not in [0, num_rows] is kStatusBadIndex. nullptr:
  // requests lie target_stride[0] apart.
  const int64_t* offsets = nullptr;
  int64_t num_rows = 0;

  // [b] in [0, num_slots): where the arrays [num_slots] of `sampling`, `draw` and `cut.room` (and
  // cut.eos, with a stride) hold a request's parameters. Another slot is kStatusBadIndex. nullptr:
  // the arrays are [b]. draw.bits stay [b, k+1].
  const int64_t* slots = nullptr;
  int64_t num_slots = 0;

  SamplingParams sampling;  // the same for both distributions (contract C1)
  DrawParams draw;          // position: that of the first draft token
  Rule rule = Rule::kToken;

  int64_t* tokens = nullptr;            // [b, k+1] accepted prefix, correction or bonus, then -1
  int64_t* num_accepted = nullptr;      // [b] in [0, length]
  float* logprobs = nullptr;            // [b, k+1] log p of each emitted token, NaN past them
  int32_t* status = nullptr;            // [b] StatusBits
  RowStatistics* statistics = nullptr;  // [b, k+1] target distribution of each emitted token, for
                                        // the level above; or nullptr
  CutParams cut;  // EOS and length; by default nothing is cut and nothing of it written

  // CUDA: kVerifyWorkspaceBytes of device memory, 16-byte aligned, zeroed once before its first use
  // and then lent to one call at a time, as the calls of one stream are; nullptr: none. With it the
  // rows of all requests are shared out over the device; results do not depend on it.
  void* workspace = nullptr;
};

constexpr int64_t kVerifyWorkspaceBytes = 196608;

// Tries to draw a correction by rejection. One succeeds as often as the draft is rejected there, so
// that few corrections need a pass over the rows.
constexpr int64_t kResidualTries = 8;

// Verifies b blocks. On the CPU the outputs are written when the call returns; on CUDA the work is
// queued. After a rejection in a row, later rows are not read (rule token; a CUDA call with a
// workspace may have read some of them already).
POLYSPEC_API Result verify(const VerifyParams& params, Stream stream = Stream::cpu());

// Zeroes device memory that is to be a workspace and waits until it is. Not while the stream is
// being captured.
POLYSPEC_API Result clear_workspace(void* workspace, int64_t bytes, Stream stream);

// Whether a CUDA stream is being captured into a graph; false where that is unknown.
POLYSPEC_API bool is_capturing(Stream stream);

}  // namespace polyspec

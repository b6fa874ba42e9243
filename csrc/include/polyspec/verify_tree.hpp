// polyspec::verify_tree: verify a tree of draft tokens against the target's logits and emit the
// accepted path.
#pragma once

#include "polyspec/export.h"
#include "polyspec/verify.hpp"

namespace polyspec {

// A tree of up to n nodes, each a draft token; a node's parent comes before it, and the children of
// one parent are in the order of their tests. Row 0 of the target's logits is the distribution
// after the tree's root (the text so far), row i+1 the distribution after node i. The walk begins
// at row 0 and ends at the first row without an accepted child; the last token is the correction,
// or after a leaf the bonus. A chain is the tree with parents i-1.
//
// With p the processed distribution of the row that the walk is at:
//   deterministic children (EAGLE-2's top-k): a token is drawn from p; if it is a child's, the walk
//     goes on there, otherwise it ends with it. That is the distribution of "accept x with p(x),
//     else zero p(x) and renormalise, for one child after the other": either way child x is gone to
//     with probability p(x), and a token that is no child's ends the walk with p of it. It costs
//     one draw and one pass over a row, however many children there are.
//   children drawn independently from one draft distribution q, with replacement: the recursive
//     residual (Yang et al. 2024, arXiv 2401.06706; Jeon et al. 2024, arXiv 2402.14160). Child j
//     (from 0) is accepted while u < r_j(x) / q(x), with r_0 = p and r_{j+1} = norm(max(r_j - q,
//     0)); once all are rejected the token is drawn from the last r. Since r_j is proportional to
//     max(p - s_j q, 0), with s_0 = 0 and s_{j+1} = s_j + sum_x max(p(x) - s_j q(x), 0), one number
//     per rejection is all there is to keep. Siblings may be equal: a rejected token has residual
//     0.
//   temperature 0: the walk follows the argmax, and draft rows are not read.
// Either way the emitted tokens have exactly the target's distribution.
//
// That is the token rule. The block rule verifies drawn children from the leaves to the root: a
// child is tried with all its drawn descendants, and the next child follows when none of them is
// accepted. With one path it is the block rule of `verify`, with the same draws. K paths drawn from
// the root are a tree: paths share the nodes of a common prefix, and a sibling that was drawn again
// is a separate node, in the order drawn, without children; its continuation hangs from the first
// of its equals. (Joining equal siblings would change the distribution.) A row without drawn
// children is a leaf; if accepted the walk goes on from there as from a root, so that deterministic
// children are verified by one draw under either rule.
//
// verify(v, w), w = P(v or a node below is accepted | history at v), 1 at the root; with N drawn
// children, m_p, m_q the integer masses after v, M_p, M_q their sums:
//   at a leaf, and where no token has probability after v: accept v if u < w;
//   b(x) in [0, 16): 8 + floor(log2((m_p M_q) / (m_q M_p))), cut to [0, 15]; 0 if N = 1. The two
//     products are rounded to float64;  H_b = sum of m_q over the bucket (M_q if N = 1);
//   L_b = 0 for all b, d = 1 for the first child, then d = (1 - w) + R;
//   a child is tried: of the highest bucket g that has not been tried the first child, with law_b =
//     (M_q / B) sum over k < n of hi^k lo^(n-1-k) for b below the bucket before it, where n
//     children and the masses B of q lie, lo and hi the sums of H_0 ... up to b, without and with
//     it, over B; then the others of bucket g in order, with law_g = M_q / H_g, 0 elsewhere:
//     it is verify(vx, a), a = min(1, max(w p(x)/q(x) - L_b(x), 0) / (d law_b(x)));
//   where nothing is accepted, L_b += d law_b for all b, and R = 2^-S sum of the masses
//     trunc(2^S max(0, m_p (w / M_p) - m_q (L_b / M_q)));
//   no child left, or R = 0: accept v if u < R / (R + (1 - w)), always at the root, and the token
//     is drawn from these masses, by rejection first. Else nothing at v or below is accepted.
// law_b q(x) is the distribution of the child that is tried, after the children before it.
//
// As for `verify`, draft rows lie in a pool, parameters may lie at slots, and the target's rows may
// follow one another by offsets; the results are, bit for bit, the same as with the rows laid out
// as [b, n+1, v].
//
// The arithmetic is that of verify.hpp, in float64 and in this order: s_1 = 1; for j >= 1, m the
// integer masses trunc(2^S max(0, m_p(x) (1 / M_p) - m_q(x) (s_j / M_q))) and M their sum,
//   r_j(x)/q(x) = (m(x) M_q) / (m_q(x) M),  s_{j+1} = s_j + M / 2^S.
// Where all m are 0 the token is drawn from p: kStatusZeroResidual. After the last child the
// residual is drawn from by rejection first, as in `verify`, with c / M_p = 1 / M_p and s_j / M_q.
//
// Draws (philox.hpp), at depth d of the walk, with t = d + the call's `position`: the test of child
// j is kAccept at t, node j; the token drawn from p or a residual is kEmit at t, node 0, and its
// tries are kTry at t. By the block rule the test of node i below d nodes is kAccept at t, node
// i - d. So a chain with draft rows gets the tokens that `verify` gives it by the same rule, bit
// for bit.
struct VerifyTreeParams {
  int64_t batch = 0;        // b
  int64_t nodes = 0;        // n, in [0, 2^14)
  int64_t depth = 0;        // d: the most nodes of a path
  int64_t vocab = 0;        // v, in [1, 2^31)
  int64_t draft_vocab = 0;  // vd, in [1, v]; ids past it have q = 0. Ignored without draft logits

  DType target_dtype = DType::kFloat32;
  // [b, n+1, v], or [num_rows, v] with `offsets`; unit stride along v
  const void* target_logits = nullptr;
  int64_t target_stride[2] = {0, 0};  // elements per request (not with `offsets`), per row
  // [b, n+1, ceil(v / 32)], or [num_rows, ceil(v / 32)] with `offsets`; as for `verify`
  const int32_t* allowed = nullptr;
  int64_t allowed_stride[2] = {0, 0};

  // [b, n] contiguous, target ids; or [num_rows] with `offsets`: entry offsets[i] + j is node j of
  // request i.
  const int64_t* draft_tokens = nullptr;
  // Laid out as draft_tokens: the parent's node, -1 for the root; a node's is smaller than the
  // node.
  const int64_t* parents = nullptr;
  const int64_t* counts = nullptr;  // [b] nodes in [0, n], or nullptr: n for every request

  // The pool that draft rows lie in, [num_draft_rows, vd]; nullptr: all children are deterministic.
  DType draft_dtype = DType::kFloat32;
  const void* draft_logits = nullptr;
  int64_t draft_stride = 0;  // elements per row
  int64_t num_draft_rows = 0;
  // [b, n+1] contiguous, or [num_rows] with `offsets`: the pool's row that the children of a row of
  // the target were drawn from, all of them; -1: they are deterministic. Not read where there are
  // no children. nullptr without a pool.
  const int64_t* draft_rows = nullptr;
  const RowStatistics* draft_statistics = nullptr;  // [num_draft_rows], or nullptr: computed here
  const int32_t* target_to_draft = nullptr;  // [v] draft id of each target id, -1: none, or nullptr

  // [b+1]: request i has the target's rows offsets[i] ... offsets[i+1]-1, one more than nodes, of
  // which there may be at most n (kStatusBadLength). An offset that is not in [0, num_rows] is
  // kStatusBadIndex. nullptr: requests lie target_stride[0] apart. Not with counts.
  const int64_t* offsets = nullptr;
  int64_t num_rows = 0;

  // [b] in [0, num_slots): as for `verify`. draw.bits stay [b, n+d+1].
  const int64_t* slots = nullptr;
  int64_t num_slots = 0;

  SamplingParams sampling;  // the same for both distributions (contract C1)
  // position: that of the tree's first nodes. bits: [b, n+d+1], the test of node i, then the token
  // drawn at depth 0 ... d.
  DrawParams draw;
  Rule rule = Rule::kToken;  // kBlock: at most kMostDrawnDepth drawn nodes of a path in a row

  int64_t* tokens = nullptr;        // [b, d+1] the path's tokens, correction or bonus, then -1
  int64_t* num_accepted = nullptr;  // [b] nodes of the path
  int64_t* path = nullptr;          // [b, d] nodes of the path, then -1
  int64_t* rows = nullptr;          // [b, d+1] target row that each token was drawn from, then -1
  float* logprobs = nullptr;        // [b, d+1] log p of each emitted token, NaN past them
  int32_t* status = nullptr;        // [b] StatusBits; kStatusBadTree: see there
  RowStatistics* statistics = nullptr;  // [b, d+1] target distribution of each token, or nullptr
  CutParams cut;                        // as in verify.hpp; k is d
  void* workspace = nullptr;  // CUDA: as for `verify`, the same memory in turns; nullptr: none
};

// Nodes of a path that were drawn one after the other and are verified together by the block rule.
// A longer path is kStatusBadTree.
constexpr int64_t kMostDrawnDepth = 32;

// Verifies b trees. On the CPU the outputs are written when the call returns; on CUDA the work is
// queued. Rows that the walk does not come to are not read, but that a CUDA call with a workspace
// may reduce all rows of a few requests at once.
POLYSPEC_API Result verify_tree(const VerifyTreeParams& params, Stream stream = Stream::cpu());

}  // namespace polyspec

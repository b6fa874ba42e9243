/* The C interface of polyspec, for embedders in C and in every language that can call C. C99.
 *
 * It mirrors sample.hpp, verify.hpp, verify_tree.hpp, dense.hpp, int4.hpp and scheduler.hpp;
 * what is said there about the distributions, the rules and the draws holds here. Every function
 * returns a polyspec_code or a plain value; nothing is thrown across this interface and no function
 * aborts. polyspec_last_error() explains the last failure of the calling thread.
 *
 * Growing structs. A struct that a caller fills begins with `size_t struct_size`, the size that the
 * caller was compiled with; polyspec_*_default() sets it together with the defaults. By it the
 * library reads
 * - of an earlier release's size: the fields of that release, and takes the defaults for the rest;
 * - of its own size: everything;
 * - of a larger size: everything, and fails unless all that it does not know is zero;
 * - of any other size: nothing, and fails with POLYSPEC_BAD_STRUCT_SIZE.
 * Structs without that field (polyspec_*_param, polyspec_row_statistics, polyspec_executor) never
 * change.
 *
 * Shapes: b requests, k draft tokens, v vocabulary of the target, vd <= v vocabulary of the draft.
 * Arrays are in row-major order and live where the call runs: host memory, or device memory for a
 * CUDA stream. */
#ifndef POLYSPEC_POLYSPEC_H_
#define POLYSPEC_POLYSPEC_H_

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "polyspec/export.h"

#define POLYSPEC_VERSION_MAJOR 0
#define POLYSPEC_VERSION_MINOR 1
#define POLYSPEC_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Codes ---- */

typedef int32_t polyspec_code;
enum {
  POLYSPEC_OK = 0,
  POLYSPEC_INVALID_ARGUMENT = 1, /* a pointer, size, count or enum is wrong; nothing was written */
  POLYSPEC_UNSUPPORTED = 2,      /* this build has no such backend */
  POLYSPEC_CUDA_ERROR = 3,       /* the launch failed */
  POLYSPEC_BAD_STRUCT_SIZE = 4,  /* struct_size is unknown, or a field unknown here is set */
  POLYSPEC_WRONG_STATE = 5, /* a scheduler was told something that its next step does not allow */
  POLYSPEC_OUT_OF_MEMORY = 6,
  POLYSPEC_INTERNAL_ERROR = 7, /* an exception out of an executor callback, or a defect here */
};

/* Status of one request, a bit set, 0 when all is well; status.hpp has the details. Bits below
 * POLYSPEC_STATUS_NOTES stop the request at the row they were found in; the others are notes. */
enum {
  POLYSPEC_STATUS_NAN = 1 << 0,
  POLYSPEC_STATUS_INF = 1 << 1,
  POLYSPEC_STATUS_EMPTY_ROW = 1 << 2,
  POLYSPEC_STATUS_DRAFT_ROW = 1 << 3,
  POLYSPEC_STATUS_TOKEN_OUT_OF_RANGE = 1 << 4,
  POLYSPEC_STATUS_BAD_LENGTH = 1 << 5,
  POLYSPEC_STATUS_BAD_PARAMETER = 1 << 6,
  POLYSPEC_STATUS_DRAFT_STATISTICS_MISMATCH = 1 << 7,
  POLYSPEC_STATUS_BAD_INDEX = 1 << 8,
  POLYSPEC_STATUS_BAD_TREE = 1 << 9,
  POLYSPEC_STATUS_NOTES = 1 << 16,
  POLYSPEC_STATUS_ZERO_RESIDUAL = 1 << 16,
};

/* The name of a code, such as "invalid argument". Static storage, never NULL. */
POLYSPEC_API const char* polyspec_code_string(polyspec_code code);

/* What the last failing call of this thread has to say; "" before any. Valid until the next
 * failure. */
POLYSPEC_API const char* polyspec_last_error(void);

/* Writes the names of all bits of a request's status into text[size], comma-separated, always
 * terminated when size > 0. Returns the length that the whole text has, as snprintf does. */
POLYSPEC_API size_t polyspec_status_string(int32_t status, char* text, size_t size);

/* "major.minor.patch" of the library that runs, beside the POLYSPEC_VERSION_* of the header
 * compiled with. */
POLYSPEC_API const char* polyspec_version(void);

/* 1 when the library was built with CUDA and finds a device, else 0. */
POLYSPEC_API int32_t polyspec_has_cuda(void);

/* ---- Sampling parameters and draws ---- */

/* One value for the whole batch, or one per request where `data` is not NULL. data: [b] */
typedef struct polyspec_float_param {
  const float* data;
  float value;
} polyspec_float_param;

typedef struct polyspec_int64_param {
  const int64_t* data;
  int64_t value;
} polyspec_int64_param;

typedef struct polyspec_uint64_param {
  const uint64_t* data;
  uint64_t value;
} polyspec_uint64_param;

/* The processed distribution: temperature, then top-k, top-p, min-p. Use one object for all levels
 * of a chain: a target verified with other filters than its draft was drawn with is no longer
 * lossless. */
typedef struct polyspec_sampling {
  size_t struct_size;
  polyspec_float_param temperature; /* in [0, 2^120]; 0: argmax, lowest id on ties. Default 1 */
  polyspec_int64_param top_k;       /* >= 0; default 0: off */
  polyspec_float_param top_p;       /* in [0, 1]; default 1: off */
  polyspec_float_param min_p;       /* in [0, 1]; default 0: off */
} polyspec_sampling;

/* The key of the draws. Defaults: everything 0, level 1. */
typedef struct polyspec_draw {
  size_t struct_size;
  polyspec_uint64_param seed;
  polyspec_int64_param position; /* >= 0; absolute index of the first token verified or drawn */
  /* in [0, 2^32); counts the level's rounds, so that none re-uses a draw */
  polyspec_int64_param round;
  int32_t level; /* in [1, 2^16); 1 is the target */
  /* the caller's own draws, or NULL: [b, 1] for sample, [b, k+1] for verify */
  const uint64_t* bits;
} polyspec_draw;

/* ---- Where a call runs ---- */

enum { POLYSPEC_CPU = 0, POLYSPEC_CUDA = 1 };

/* Runs body(context, i) for every i in [0, n), in any order and on any threads, and returns when
 * all are done. The library owns no threads: `run` is called only from inside the calls it is given
 * to. */
typedef void (*polyspec_body)(void* context, int64_t index);
typedef struct polyspec_executor {
  void (*run)(void* pool, int64_t n, polyspec_body body, void* context); /* NULL: serially */
  void* pool;                                                            /* handed to `run` */
} polyspec_executor;

typedef struct polyspec_stream {
  size_t struct_size;
  int32_t device;             /* POLYSPEC_CPU (default) or POLYSPEC_CUDA */
  void* cuda_stream;          /* a cudaStream_t; NULL is the legacy default stream. CUDA only */
  polyspec_executor executor; /* CPU only */
  int32_t overlap; /* CUDA, sm_90 and later: not 0 lets the launch begin while the kernel before it
                      still runs; no memory is touched before that one ends. Default 0 */
} polyspec_stream;

/* The size of the release without `overlap`. */
#define POLYSPEC_STREAM_MIN_SIZE offsetof(polyspec_stream, overlap)

/* ---- Sampling ---- */

enum { POLYSPEC_FLOAT32 = 0, POLYSPEC_BFLOAT16 = 1, POLYSPEC_FLOAT16 = 2 };

/* The distribution of one row of logits in 16 bytes, as types.hpp defines it: opaque to hand up
 * between levels. */
typedef struct polyspec_row_statistics {
  float max;
  float threshold;
  uint64_t mass;
} polyspec_row_statistics;

typedef struct polyspec_sample_params {
  size_t struct_size;
  int64_t batch;                     /* b */
  int64_t vocab;                     /* v, in [1, 2^31) */
  int32_t dtype;                     /* of logits; default POLYSPEC_FLOAT32 */
  const void* logits;                /* [b, v], unit stride along v */
  int64_t logits_stride;             /* elements from one request to the next */
  const polyspec_sampling* sampling; /* NULL: the defaults */
  const polyspec_draw* draw;         /* NULL: the defaults */
  int64_t* tokens;                   /* [b] out; -1 where the status has an error */
  float* logprobs; /* [b] out; natural log of the token's probability, NaN without a token */
  int32_t* status; /* [b] out */
  /* [b] out, or NULL; for draft_statistics of the level above */
  polyspec_row_statistics* statistics;
  polyspec_int64_param node; /* in [0, 2^14); tells draws for one position apart. Default 0 */
} polyspec_sample_params;

/* The sizes of earlier releases that are read: all fields before `statistics`, all before `node`.
 */
#define POLYSPEC_SAMPLE_PARAMS_MIN_SIZE offsetof(polyspec_sample_params, statistics)
#define POLYSPEC_SAMPLE_PARAMS_NODELESS_SIZE offsetof(polyspec_sample_params, node)

/* One token per request from the processed distribution of its logits. stream NULL: the CPU,
 * serially. */
POLYSPEC_API polyspec_code polyspec_sample(const polyspec_sample_params* params,
                                           const polyspec_stream* stream);

/* ---- Verification ---- */

enum { POLYSPEC_RULE_TOKEN = 0, POLYSPEC_RULE_BLOCK = 1 };

typedef struct polyspec_verify_params {
  size_t struct_size;
  int64_t batch;       /* b */
  int64_t draft_len;   /* k >= 0 */
  int64_t vocab;       /* v, in [1, 2^31) */
  int64_t draft_vocab; /* vd, in [1, v]; ignored without draft logits */

  int32_t target_dtype;      /* default POLYSPEC_FLOAT32 */
  const void* target_logits; /* [b, k+1, v], unit stride along v; row i is the distribution after i
                                draft tokens */
  int64_t target_stride[2];  /* elements per request, per row */

  int32_t draft_dtype;      /* default POLYSPEC_FLOAT32 */
  const void* draft_logits; /* [b, k, vd], or NULL: the proposal was deterministic */
  int64_t draft_stride[2];  /* elements per request, per row */
  /* [b, k] as sample or verify gave them, or NULL: computed here */
  const polyspec_row_statistics* draft_statistics;
  const int32_t* target_to_draft; /* [v] draft id of each target id, -1: none; NULL: identity */

  const int64_t* draft_tokens;  /* [b, k] target ids */
  int64_t draft_tokens_stride;  /* elements per request */
  const int64_t* draft_lengths; /* [b] in [0, k], or NULL: k for every request */

  const polyspec_sampling* sampling; /* NULL: the defaults; the same as for the draft */
  const polyspec_draw* draw;         /* NULL: the defaults */
  int32_t rule;                      /* default POLYSPEC_RULE_TOKEN */

  int64_t* tokens;       /* [b, k+1] out; accepted prefix, correction or bonus, then -1 */
  int64_t* num_accepted; /* [b] out; in [0, length] */
  float* logprobs;       /* [b, k+1] out; log p of each emitted token, NaN past them */
  int32_t* status;       /* [b] out */
  /* [b, k+1] out, or NULL; for draft_statistics of the level above */
  polyspec_row_statistics* statistics;

  /* Where a text ends: verify.hpp, CutParams. Tokens behind a cut are -1. */
  const int64_t* eos;   /* [b, eos_count] ids that end a text and are kept, -1 is no id; or NULL */
  int64_t eos_count;    /* default 0 */
  int64_t eos_stride;   /* elements per request; default 0: one list for all */
  const int64_t* room;  /* [b] >= 0, most tokens that may be emitted; NULL: no limit */
  int64_t* num_emitted; /* [b] out, or NULL; tokens emitted, in [0, k+1] */
  int64_t* ended;       /* [b] out, or NULL; POLYSPEC_ENDED_*, 0: the text goes on */
  int64_t* cache_lengths;  /* [b] out, or NULL; position + accepted tokens */
  int64_t* next_ids;       /* [b] out, or NULL; the last emitted token, -1 if there is none */
  int64_t* next_positions; /* [b] out, or NULL; its absolute position, -1 if there is none */

  /* CUDA: POLYSPEC_VERIFY_WORKSPACE_BYTES of device memory, 16-byte aligned, zeroed once and lent
   * to one call at a time; or NULL. Makes small batches faster. */
  void* workspace;

  /* Rows and parameters that do not lie side by side: verify.hpp, VerifyParams. */
  const int64_t* draft_rows; /* laid out as draft_tokens: row of the pool draft_logits
                                [num_draft_rows, vd] of each token, -1: deterministic; or NULL.
                                draft_statistics are then [num_draft_rows] */
  int64_t draft_rows_stride; /* elements per request (not with offsets) */
  int64_t num_draft_rows;
  const int64_t* offsets; /* [b+1] into target_logits [num_rows, v] and draft_tokens [num_rows], or
                             NULL. Request i has rows offsets[i] ... offsets[i+1]-1 and one draft
                             token fewer, at the same places */
  int64_t num_rows;
  const int64_t* slots; /* [b] in [0, num_slots): where the arrays of sampling, draw, eos and room
                           hold a request's parameters; or NULL: those arrays are [b] */
  int64_t num_slots;
} polyspec_verify_params;

#define POLYSPEC_VERIFY_WORKSPACE_BYTES 65536

enum { POLYSPEC_ENDED_EOS = 1 << 0, POLYSPEC_ENDED_ROOM = 1 << 1 };

/* The sizes of earlier releases that are read: all fields before `statistics`, before `eos`, before
 * `draft_rows`. */
#define POLYSPEC_VERIFY_PARAMS_MIN_SIZE offsetof(polyspec_verify_params, statistics)
#define POLYSPEC_VERIFY_PARAMS_UNCUT_SIZE offsetof(polyspec_verify_params, eos)
#define POLYSPEC_VERIFY_PARAMS_RECTANGULAR_SIZE offsetof(polyspec_verify_params, draft_rows)

/* Verifies b drafted blocks; the emitted tokens have the target's distribution. stream NULL: the
 * CPU, serially. */
POLYSPEC_API polyspec_code polyspec_verify(const polyspec_verify_params* params,
                                           const polyspec_stream* stream);

/* ---- Dense product ---- */

/* A matrix [outputs, inputs]; dense.hpp has the layout and the order of the sums. CPU only. */
typedef struct polyspec_dense_params {
  size_t struct_size;
  int64_t outputs; /* n >= 1 */
  int64_t inputs;  /* k >= 1 */
  int32_t dtype;   /* of all; POLYSPEC_FLOAT32 (default) or POLYSPEC_BFLOAT16 */
  void* packed;    /* polyspec_dense_packed_bytes, 64-byte aligned; what pack writes */

  /* pack alone: */
  const void* weights;    /* [n, k], unit stride along k */
  int64_t weights_stride; /* elements from one output to the next */

  /* product alone: */
  int64_t tokens;   /* m >= 0 */
  const void* x;    /* [m, k], unit stride along k */
  int64_t x_stride; /* elements from one token to the next */
  const void* bias; /* [n], or NULL for none */
  void* y;          /* [m, n] out, unit stride along n */
  int64_t y_stride; /* elements from one token to the next */
  void* workspace;  /* polyspec_dense_workspace_bytes, 64-byte aligned */
} polyspec_dense_params;

/* Sizes for the shape, and for `tokens`; -1 where that is none. */
POLYSPEC_API int64_t polyspec_dense_packed_bytes(const polyspec_dense_params* params);
POLYSPEC_API int64_t polyspec_dense_workspace_bytes(const polyspec_dense_params* params);

POLYSPEC_API polyspec_code polyspec_dense_pack(const polyspec_dense_params* params);

/* y = x W^T + b. stream NULL: serially. */
POLYSPEC_API polyspec_code polyspec_dense_product(const polyspec_dense_params* params,
                                                  const polyspec_stream* stream);

/* ---- 4-bit product ---- */

/* A matrix [outputs, inputs] of 4-bit numbers in groups along the inputs; int4.hpp has the layout
 * and the bound of the product. CPU only. */
typedef struct polyspec_int4_params {
  size_t struct_size;
  int64_t outputs;     /* n >= 1 */
  int64_t inputs;      /* k, a positive multiple of group */
  int32_t group;       /* 32, 64, 128 (default) or 256 */
  int32_t scale_dtype; /* POLYSPEC_FLOAT32 or POLYSPEC_BFLOAT16 (default) */
  uint8_t* packed;     /* polyspec_int4_packed_bytes, 64-byte aligned; what pack writes */

  /* pack reads, unpack writes, product ignores: */
  uint8_t* values; /* [n, k] q in [0, 16) */
  float* scales;   /* [n, k / group] */
  float* zeros;    /* [n, k / group] */

  /* product alone: */
  int64_t tokens;   /* m >= 0 */
  int32_t dtype;    /* of x and y; default POLYSPEC_FLOAT32 */
  const void* x;    /* [m, k], unit stride along k */
  int64_t x_stride; /* elements from one token to the next */
  void* y;          /* [m, n] out, unit stride along n */
  int64_t y_stride; /* elements from one token to the next */
  void* workspace;  /* polyspec_int4_workspace_bytes, 64-byte aligned */
} polyspec_int4_params;

/* Sizes for the shape, and for `tokens`; -1 where that is none. */
POLYSPEC_API int64_t polyspec_int4_packed_bytes(const polyspec_int4_params* params);
POLYSPEC_API int64_t polyspec_int4_workspace_bytes(const polyspec_int4_params* params);

POLYSPEC_API polyspec_code polyspec_int4_pack(const polyspec_int4_params* params);
POLYSPEC_API polyspec_code polyspec_int4_unpack(const polyspec_int4_params* params);

/* y = x W^T, w = (q - 8) scale + zero. stream NULL: serially. */
POLYSPEC_API polyspec_code polyspec_int4_product(const polyspec_int4_params* params,
                                                 const polyspec_stream* stream);

/* ---- Verification of trees ---- */

typedef struct polyspec_verify_tree_params {
  size_t struct_size;
  int64_t batch;       /* b */
  int64_t nodes;       /* n, in [0, 2^14) */
  int64_t depth;       /* d, in [0, n]: the most nodes of a path */
  int64_t vocab;       /* v, in [1, 2^31) */
  int64_t draft_vocab; /* vd, in [1, v]; ignored without draft logits */

  int32_t target_dtype;      /* default POLYSPEC_FLOAT32 */
  const void* target_logits; /* [b, n+1, v], unit stride along v; row 0 is the distribution behind
                                the root, row i+1 the one behind node i */
  int64_t target_stride[2];  /* elements per request, per row */

  const int64_t* draft_tokens; /* [b, n] target ids */
  const int64_t* parents;      /* [b, n] the parent's node, smaller than the node; -1: the root */
  const int64_t* counts;       /* [b] nodes in [0, n], or NULL: n for every request */

  int32_t draft_dtype;      /* default POLYSPEC_FLOAT32 */
  const void* draft_logits; /* [num_draft_rows, vd], or NULL: all children are deterministic */
  int64_t draft_stride;     /* elements per row */
  int64_t num_draft_rows;
  const int64_t* draft_rows; /* [b, n+1] the pool's row that the children behind a row of the target
                                were drawn from, independently; -1: deterministic; or NULL */
  const polyspec_row_statistics* draft_statistics; /* [num_draft_rows], or NULL: computed here */
  const int32_t* target_to_draft; /* [v] draft id of each target id, -1: none; NULL: identity */

  const polyspec_sampling* sampling; /* NULL: the defaults; the same as for the draft */
  const polyspec_draw* draw;         /* NULL: the defaults. bits: [b, n+d+1] */

  int64_t* tokens;       /* [b, d+1] out; the path's tokens, correction or bonus, then -1 */
  int64_t* num_accepted; /* [b] out; nodes of the path */
  int64_t* path;         /* [b, d] out; the nodes, then -1 */
  int64_t* rows;         /* [b, d+1] out; the target's row of each token, then -1 */
  float* logprobs;       /* [b, d+1] out; log p of each emitted token, NaN past them */
  int32_t* status;       /* [b] out */
  polyspec_row_statistics* statistics; /* [b, d+1] out, or NULL */

  /* Where a text ends, as in polyspec_verify_params. */
  const int64_t* eos;
  int64_t eos_count;
  int64_t eos_stride;
  const int64_t* room;
  int64_t* num_emitted;
  int64_t* ended;
  int64_t* cache_lengths;
  int64_t* next_ids;
  int64_t* next_positions;

  /* Rows and parameters that do not lie side by side: as in polyspec_verify_params. */
  const int64_t* offsets; /* [b+1] into target_logits [num_rows, v], draft_tokens, parents and
                             draft_rows [num_rows], or NULL. Request i has rows offsets[i] ...
                             offsets[i+1]-1 and one node fewer, at the same places; not with counts
                           */
  int64_t num_rows;
  const int64_t* slots; /* [b] in [0, num_slots), or NULL */
  int64_t num_slots;
} polyspec_verify_tree_params;

/* The size of an earlier release that is read: all fields before `offsets`. */
#define POLYSPEC_VERIFY_TREE_PARAMS_RECTANGULAR_SIZE offsetof(polyspec_verify_tree_params, offsets)

/* Verifies b trees; the emitted tokens have the target's distribution. stream NULL: the CPU,
 * serially. */
POLYSPEC_API polyspec_code polyspec_verify_tree(const polyspec_verify_tree_params* params,
                                                const polyspec_stream* stream);

/* ---- Scheduler ---- */

/* The host state machine of a chain of n levels, level 1 the target, level n the drafter. Not to be
 * used from two threads at once. scheduler.hpp says what each step means. */
typedef struct polyspec_scheduler polyspec_scheduler;

enum { POLYSPEC_STEP_DRAFT = 0, POLYSPEC_STEP_VERIFY = 1, POLYSPEC_STEP_DONE = 2 };

typedef struct polyspec_step {
  size_t struct_size; /* set by the caller; no more than this many bytes are written */
  int32_t kind;       /* POLYSPEC_STEP_* */
  int32_t level;      /* 1 ... n */
  int64_t count;      /* tokens to draft, >= 1, or pending tokens to verify, >= 0 */
  int64_t of_tail;    /* of these, tokens of a tail: all or none of a draft, which are then pending
                         for level 1, and of those that level 1 verifies the last ones */
} polyspec_step;

/* The size of an earlier release that is written: all fields before `of_tail`. */
#define POLYSPEC_STEP_WITHOUT_TAIL_SIZE offsetof(polyspec_step, of_tail)

/* windows: [num_windows], n - 1 numbers >= 0: windows[i-1] tokens is what level i waits for. */
POLYSPEC_API polyspec_code polyspec_scheduler_create(const int64_t* windows, int32_t num_windows,
                                                     polyspec_scheduler** scheduler);

/* The same, and rounds: [num_windows] numbers >= 0: level i also verifies what it has once
 * rounds[i-1] blocks have come from below, full window or not; 0 is no bound. */
POLYSPEC_API polyspec_code polyspec_scheduler_create_bounded(const int64_t* windows,
                                                             const int64_t* rounds,
                                                             int32_t num_windows,
                                                             polyspec_scheduler** scheduler);
POLYSPEC_API void polyspec_scheduler_destroy(polyspec_scheduler* scheduler); /* NULL is allowed */

/* Begins a request of max_new_tokens >= 0 tokens. */
POLYSPEC_API polyspec_code polyspec_scheduler_start(polyspec_scheduler* scheduler,
                                                    int64_t max_new_tokens);

/* What to do now; changes nothing. */
POLYSPEC_API polyspec_code polyspec_scheduler_next(const polyspec_scheduler* scheduler,
                                                   polyspec_step* step);

/* What came of it: `emitted` tokens were drafted, or handed up (accepted and correction or bonus,
 * cut after the first EOS); eos != 0: the last of them ends the text. */
POLYSPEC_API polyspec_code polyspec_scheduler_report(polyspec_scheduler* scheduler, int32_t level,
                                                     int64_t emitted, int32_t eos);

/* windows: [num_windows] as at creation, and as many; they hold from the next step on. */
POLYSPEC_API polyspec_code polyspec_scheduler_set_windows(polyspec_scheduler* scheduler,
                                                          const int64_t* windows,
                                                          int32_t num_windows);

/* With a tail, level n drafts up to `tail` tokens more before level 1 verifies what level 2 has
 * handed up; level 1 verifies them as well, each against the distribution of level n that it was
 * drawn from. It holds from the next one on; 0, as at creation, is none. A chain of two levels has
 * none. */
POLYSPEC_API polyspec_code polyspec_scheduler_set_tail(polyspec_scheduler* scheduler, int64_t tail);

/* windows: [num_windows] out, num_windows = n - 1. */
POLYSPEC_API polyspec_code polyspec_scheduler_get_windows(const polyspec_scheduler* scheduler,
                                                          int64_t* windows, int32_t num_windows);

/* Tokens that wait for level 1 ... n-1, for level 1 a tail's as well; tokens that the target has
 * emitted; 1 when nothing is left to do; the number n of levels; tokens of a tail at most. They
 * answer -1 for a NULL scheduler or a level without pending tokens of its own. */
POLYSPEC_API int64_t polyspec_scheduler_pending(const polyspec_scheduler* scheduler, int32_t level);
POLYSPEC_API int64_t polyspec_scheduler_committed(const polyspec_scheduler* scheduler);
POLYSPEC_API int32_t polyspec_scheduler_done(const polyspec_scheduler* scheduler);
POLYSPEC_API int32_t polyspec_scheduler_levels(const polyspec_scheduler* scheduler);
POLYSPEC_API int64_t polyspec_scheduler_tail(const polyspec_scheduler* scheduler);

/* ---- Window policies ---- */

/* Chooses the windows of a chain's rounds from what is over; policy.hpp says what each kind does
 * and what the options mean. Not to be used from two threads at once. */
typedef struct polyspec_policy polyspec_policy;

enum {
  POLYSPEC_POLICY_FIXED = 0,
  POLYSPEC_POLICY_ONLINE = 1,
  POLYSPEC_POLICY_FSM = 2,
  POLYSPEC_POLICY_CACHED_FSM = 3,
  POLYSPEC_POLICY_Q_LEARNING = 4,
  POLYSPEC_POLICY_JOINT = 5,
};

typedef struct polyspec_policy_options {
  size_t struct_size;
  int32_t kind;               /* default POLYSPEC_POLICY_JOINT */
  int32_t num_windows;        /* n - 1 >= 1 */
  const int64_t* windows;     /* [num_windows] of the first round, target first */
  const int64_t* max_windows; /* [num_windows], or NULL: 16 for the drafter, else 32 */
  int64_t history;
  double max_acceptance;
  double forgetting;
  int64_t ngram;
  double learning_rate;
  double discount;
  double exploration;
  uint64_t seed;
  int32_t guard;
  double guard_loss;
  int64_t guard_hold;
} polyspec_policy_options;

/* One step that a row took part in. This struct never changes. */
typedef struct polyspec_step_report {
  int32_t level;    /* 1 ... n; n drafted, the others verified */
  int32_t repeated; /* not 0: the time was told with another row's report */
  int64_t tokens;   /* verified or drafted in this row */
  int64_t accepted; /* of those verified */
  int64_t width;    /* the most tokens of any row in the step */
  int64_t batch;    /* rows that took part */
  double seconds;   /* wall time of the step for all its rows; 0: not measured */
} polyspec_step_report;

typedef struct polyspec_round_report {
  size_t struct_size;
  int64_t request;                   /* number of the row */
  int32_t begins;                    /* not 0: nothing of it is known yet */
  const polyspec_step_report* steps; /* [num_steps] of the round that is over */
  int64_t num_steps;
  const int64_t* tokens; /* [num_tokens] committed by it; the prompt where it begins */
  int64_t num_tokens;
} polyspec_round_report;

POLYSPEC_API polyspec_code polyspec_policy_create(const polyspec_policy_options* options,
                                                  polyspec_policy** policy);
POLYSPEC_API void polyspec_policy_destroy(polyspec_policy* policy); /* NULL is allowed */
POLYSPEC_API polyspec_code polyspec_policy_reset(polyspec_policy* policy);

/* windows: [num_windows] out, num_windows = n - 1; for polyspec_scheduler_set_windows. */
POLYSPEC_API polyspec_code polyspec_policy_next(polyspec_policy* policy,
                                                const polyspec_round_report* report,
                                                int64_t* windows, int32_t num_windows);

/* ---- Defaults ---- */

/* In the header, so that struct_size is the caller's own. */

static inline polyspec_sampling polyspec_sampling_default(void) {
  polyspec_sampling out;
  memset(&out, 0, sizeof out);
  out.struct_size = sizeof out;
  out.temperature.value = 1.0f;
  out.top_p.value = 1.0f;
  return out;
}

static inline polyspec_draw polyspec_draw_default(void) {
  polyspec_draw out;
  memset(&out, 0, sizeof out);
  out.struct_size = sizeof out;
  out.level = 1;
  return out;
}

static inline polyspec_stream polyspec_stream_default(void) {
  polyspec_stream out;
  memset(&out, 0, sizeof out);
  out.struct_size = sizeof out;
  return out;
}

static inline polyspec_sample_params polyspec_sample_params_default(void) {
  polyspec_sample_params out;
  memset(&out, 0, sizeof out);
  out.struct_size = sizeof out;
  return out;
}

static inline polyspec_verify_params polyspec_verify_params_default(void) {
  polyspec_verify_params out;
  memset(&out, 0, sizeof out);
  out.struct_size = sizeof out;
  return out;
}

static inline polyspec_dense_params polyspec_dense_params_default(void) {
  polyspec_dense_params out;
  memset(&out, 0, sizeof out);
  out.struct_size = sizeof out;
  return out;
}

static inline polyspec_int4_params polyspec_int4_params_default(void) {
  polyspec_int4_params out;
  memset(&out, 0, sizeof out);
  out.struct_size = sizeof out;
  out.group = 128;
  out.scale_dtype = POLYSPEC_BFLOAT16;
  return out;
}

static inline polyspec_policy_options polyspec_policy_options_default(void) {
  polyspec_policy_options out;
  memset(&out, 0, sizeof out);
  out.struct_size = sizeof out;
  out.kind = POLYSPEC_POLICY_JOINT;
  out.history = 64;
  out.max_acceptance = 0.98;
  out.forgetting = 0.9;
  out.ngram = 3;
  out.learning_rate = 0.2;
  out.discount = 0.5;
  out.exploration = 0.1;
  out.guard = 1;
  out.guard_loss = 6;
  out.guard_hold = 48;
  return out;
}

static inline polyspec_round_report polyspec_round_report_default(void) {
  polyspec_round_report out;
  memset(&out, 0, sizeof out);
  out.struct_size = sizeof out;
  return out;
}

static inline polyspec_verify_tree_params polyspec_verify_tree_params_default(void) {
  polyspec_verify_tree_params out;
  memset(&out, 0, sizeof out);
  out.struct_size = sizeof out;
  return out;
}

static inline polyspec_step polyspec_step_default(void) {
  polyspec_step out;
  memset(&out, 0, sizeof out);
  out.struct_size = sizeof out;
  return out;
}

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* POLYSPEC_POLYSPEC_H_ */

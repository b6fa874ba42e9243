/* The C interface of polyspec, for embedders in C and in every language that can call C. C99.
 *
 * It mirrors sample.hpp, verify.hpp, verify_tree.hpp, dense.hpp, int4.hpp, attention.hpp,
 * kv_cache.hpp, round_state.hpp, scheduler.hpp and policy.hpp; their contracts hold here. Every
 * function returns a polyspec_code or a plain value, -1 for none; the interface has no exceptions,
 * and no function aborts. polyspec_last_error() explains the last failure of the calling thread.
 *
 * Threads. All functions may be called from any number of threads at once, on memory that the calls
 * do not write in common; a scheduler, a policy or a workspace is lent to one call at a time.
 *
 * Growing structs. A struct that a caller fills begins with `size_t struct_size`, the size that the
 * caller was compiled with; polyspec_*_default() sets it together with the defaults. By it the
 * library reads
 * - of an earlier release's size: the fields of that release, and takes the defaults for the rest;
 * - of this release's size: everything;
 * - of a larger size: everything, and fails unless all unknown fields are zero;
 * - of any other size: nothing, and fails with POLYSPEC_BAD_STRUCT_SIZE.
 * Structs without that field (polyspec_*_param, polyspec_row_statistics, polyspec_executor,
 * polyspec_kv_*, polyspec_step_report) never change.
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
  POLYSPEC_UNSUPPORTED = 2,      /* this build lacks the backend */
  POLYSPEC_CUDA_ERROR = 3,       /* the launch failed */
  POLYSPEC_BAD_STRUCT_SIZE = 4,  /* struct_size is unknown, or a field unknown here is set */
  POLYSPEC_WRONG_STATE = 5,      /* a report that the scheduler's next step does not allow */
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

/* The name of a code, for example "invalid argument". Static storage, never NULL. */
POLYSPEC_API const char* polyspec_code_string(polyspec_code code);

/* The message of this thread's last failing call; "" before any. Valid until the next failure. */
POLYSPEC_API const char* polyspec_last_error(void);

/* Writes the names of all bits of a request's status into text[size], comma-separated, always
 * terminated when size > 0. Returns the length that the whole text has, as snprintf does. */
POLYSPEC_API size_t polyspec_status_string(int32_t status, char* text, size_t size);

/* "major.minor.patch" of the library; POLYSPEC_VERSION_* are the header's. */
POLYSPEC_API const char* polyspec_version(void);

/* 1 when the library was built with CUDA and finds a device, else 0. */
POLYSPEC_API int32_t polyspec_has_cuda(void);

/* Operators, for the two functions below; support.hpp says which functions each one is. */
enum {
  POLYSPEC_OP_SAMPLE = 0,
  POLYSPEC_OP_VERIFY = 1,
  POLYSPEC_OP_VERIFY_TREE = 2,
  POLYSPEC_OP_DENSE = 3,
  POLYSPEC_OP_INT4 = 4,
  POLYSPEC_OP_ATTENTION = 5,
  POLYSPEC_OP_CACHE = 6,
  POLYSPEC_OP_SCHEDULE = 7,
};

/* 1 where the operator runs on the device (POLYSPEC_CPU, POLYSPEC_CUDA) with elements of the type
 * (POLYSPEC_FLOAT32, ...), else 0. */
POLYSPEC_API int32_t polyspec_supports(int32_t op, int32_t device, int32_t dtype);

/* The instruction set that the operator's CPU loops use on this processor: "baseline", "dotprod",
 * "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16" or "amx". NULL for no operator. */
POLYSPEC_API const char* polyspec_isa(int32_t op);

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
  polyspec_int64_param position; /* absolute index of the first token verified or drawn; >= 0, and
                                    no token's exceeds 2^63 - 1 */
  /* in [0, 2^32); counts the level's rounds, so that none re-uses a draw */
  polyspec_int64_param round;
  int32_t level; /* in [1, 2^16); 1 is the target */
  /* draws of the caller, or NULL: [b, 1] for sample, [b, k+1] for verify */
  const uint64_t* bits;
} polyspec_draw;

/* ---- Where a call runs ---- */

enum { POLYSPEC_CPU = 0, POLYSPEC_CUDA = 1 };

/* Runs body(context, i) for every i in [0, n), in any order and on any threads, and returns when
 * all are done. The library owns no threads: only calls that get `run` call it. */
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
} polyspec_stream;

/* ---- Sampling ---- */

/* A stride that is left at 0 is that of elements side by side, here and below, or is refused; some
 * say otherwise. */

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
  polyspec_int64_param node; /* in [0, 2^14); distinguishes draws for one position. Default 0 */
  /* [b, ceil(v / 32)] allowed ids, bit i % 32 of word i / 32; a forbidden id has probability 0. Or
   * NULL: all are allowed */
  const int32_t* allowed;
  int64_t allowed_stride; /* words from one request to the next */
} polyspec_sample_params;

/* The sizes of earlier releases that are read: all fields before `statistics`, before `node`,
 * before `allowed`. */
#define POLYSPEC_SAMPLE_PARAMS_MIN_SIZE offsetof(polyspec_sample_params, statistics)
#define POLYSPEC_SAMPLE_PARAMS_NODELESS_SIZE offsetof(polyspec_sample_params, node)
#define POLYSPEC_SAMPLE_PARAMS_MASKLESS_SIZE offsetof(polyspec_sample_params, allowed)

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
  const int64_t* draft_lengths; /* [b] in [0, k], or NULL: k for every request; see offsets */

  const polyspec_sampling* sampling; /* NULL: the defaults; the same as for the draft */
  const polyspec_draw* draw;         /* NULL: the defaults */
  int32_t rule;                      /* default POLYSPEC_RULE_TOKEN */

  int64_t* tokens;       /* [b, k+1] out; accepted prefix, correction or bonus, then -1 */
  int64_t* num_accepted; /* [b] out; in [0, length] */
  float* logprobs;       /* [b, k+1] out; log p of each emitted token, NaN past them */
  int32_t* status;       /* [b] out */
  /* [b, k+1] out, or NULL; for draft_statistics of the level above */
  polyspec_row_statistics* statistics;

  /* Where a text ends: verify.hpp, CutParams. Tokens after a cut are -1. */
  const int64_t* eos;   /* [b, eos_count] ids that end a text and are kept, -1 is no id; or NULL */
  int64_t eos_count;    /* default 0 */
  int64_t eos_stride;   /* elements per request; default 0: one list for all */
  const int64_t* room;  /* [b] >= 0, most tokens that may be emitted; NULL: no limit */
  int64_t* num_emitted; /* [b] out, or NULL; tokens emitted, in [0, k+1] */
  int64_t* ended;       /* [b] out, or NULL; POLYSPEC_ENDED_*, 0: the text goes on */
  int64_t* cache_lengths;  /* [b] out, or NULL; position + accepted tokens that a row follows */
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
                             NULL. Request i has rows offsets[i] ... offsets[i+1]-1 and, at the same
                             indices, one draft token fewer or draft_lengths[i], at most its rows.
                             Of as many tokens as rows no bonus is emitted after the last */
  int64_t num_rows;
  const int64_t* slots; /* [b] in [0, num_slots): where the arrays of sampling, draw, eos and room
                           hold a request's parameters; or NULL: the arrays are [b] */
  int64_t num_slots;

  /* [b, k+1, ceil(v / 32)], or [num_rows, ceil(v / 32)] with offsets: allowed ids of each row of
   * the target, as in polyspec_sample_params; or NULL */
  const int32_t* allowed;
  int64_t allowed_stride[2]; /* words per request (not with offsets), per row */
} polyspec_verify_params;

#define POLYSPEC_VERIFY_WORKSPACE_BYTES 196608

enum { POLYSPEC_ENDED_EOS = 1 << 0, POLYSPEC_ENDED_ROOM = 1 << 1 };

/* The sizes of earlier releases that are read: all fields before `statistics`, before `eos`, before
 * `draft_rows`, before `allowed`. */
#define POLYSPEC_VERIFY_PARAMS_MIN_SIZE offsetof(polyspec_verify_params, statistics)
#define POLYSPEC_VERIFY_PARAMS_UNCUT_SIZE offsetof(polyspec_verify_params, eos)
#define POLYSPEC_VERIFY_PARAMS_RECTANGULAR_SIZE offsetof(polyspec_verify_params, draft_rows)
#define POLYSPEC_VERIFY_PARAMS_MASKLESS_SIZE offsetof(polyspec_verify_params, allowed)

/* Verifies b drafted blocks; the emitted tokens have the target's distribution. stream NULL: the
 * CPU, serially. */
POLYSPEC_API polyspec_code polyspec_verify(const polyspec_verify_params* params,
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
  const void* target_logits; /* [b, n+1, v], unit stride along v; row 0 is the distribution after
                                the root, row i+1 the distribution after node i */
  int64_t target_stride[2];  /* elements per request, per row */

  const int64_t* draft_tokens; /* [b, n] target ids */
  const int64_t* parents;      /* [b, n] the parent's node, smaller than the node; -1: the root */
  const int64_t* counts;       /* [b] nodes in [0, n], or NULL: n for every request */

  int32_t draft_dtype;      /* default POLYSPEC_FLOAT32 */
  const void* draft_logits; /* [num_draft_rows, vd], or NULL: all children are deterministic */
  int64_t draft_stride;     /* elements per row */
  int64_t num_draft_rows;
  const int64_t* draft_rows; /* [b, n+1] the pool's row that the children of a row of the target
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
                             offsets[i+1]-1 and one node fewer, at the same indices; not with counts
                           */
  int64_t num_rows;
  const int64_t* slots; /* [b] in [0, num_slots), or NULL */
  int64_t num_slots;

  void* workspace; /* CUDA: as in polyspec_verify_params, the same memory in turns; or NULL */

  /* [b, n+1, ceil(v / 32)], or [num_rows, ceil(v / 32)] with offsets: as in
   * polyspec_verify_params; or NULL */
  const int32_t* allowed;
  int64_t allowed_stride[2];

  int32_t rule; /* of drawn children: default POLYSPEC_RULE_TOKEN; verify_tree.hpp */
} polyspec_verify_tree_params;

/* The sizes of earlier releases that are read: all fields before `offsets`, before `workspace`,
 * before `allowed`, before `rule`. */
#define POLYSPEC_VERIFY_TREE_PARAMS_RECTANGULAR_SIZE offsetof(polyspec_verify_tree_params, offsets)
#define POLYSPEC_VERIFY_TREE_PARAMS_WALKED_SIZE offsetof(polyspec_verify_tree_params, workspace)
#define POLYSPEC_VERIFY_TREE_PARAMS_MASKLESS_SIZE offsetof(polyspec_verify_tree_params, allowed)
#define POLYSPEC_VERIFY_TREE_PARAMS_RULELESS_SIZE offsetof(polyspec_verify_tree_params, rule)

/* Verifies b trees; the emitted tokens have the target's distribution. stream NULL: the CPU,
 * serially. */
POLYSPEC_API polyspec_code polyspec_verify_tree(const polyspec_verify_tree_params* params,
                                                const polyspec_stream* stream);

/* ---- Packed weights ---- */

/* A label before packed weights has the id of their layout and their shape. A product refuses a
 * label of another layout or shape; *_packed_check checks weights out of a file beforehand. An id
 * is never reused for another layout. */
enum { POLYSPEC_LAYOUT_DENSE = 4, POLYSPEC_LAYOUT_INT4 = 5 };

/* ---- Dense product ---- */

/* A matrix [n, k]; dense.hpp has the layout and the order of the sums. */
typedef struct polyspec_dense_shape {
  size_t struct_size;
  int64_t outputs; /* n >= 1 */
  int64_t inputs;  /* k >= 1 */
  int32_t dtype;   /* of weights, bias, x and y; POLYSPEC_FLOAT32 (default) or POLYSPEC_BFLOAT16 */
} polyspec_dense_shape;

typedef struct polyspec_dense_pack_params {
  size_t struct_size;
  const polyspec_dense_shape* shape;
  const void* weights;    /* [n, k], unit stride along k */
  int64_t weights_stride; /* elements from one output to the next, >= k */
  void* packed;           /* out; polyspec_dense_packed_bytes, 64-byte aligned */
} polyspec_dense_pack_params;

typedef struct polyspec_dense_product_params {
  size_t struct_size;
  const polyspec_dense_shape* shape;
  int64_t tokens;     /* m >= 0 */
  const void* x;      /* [m, k], unit stride along k */
  int64_t x_stride;   /* elements from one token to the next, >= k */
  const void* packed; /* as polyspec_dense_pack wrote it, 64-byte aligned; on CUDA the weights */
  const void* bias;   /* [n], or NULL for none */
  void* y;            /* [m, n] out, unit stride along n; apart from all that is read */
  int64_t y_stride;   /* elements from one token to the next, >= n */
  void* workspace;    /* polyspec_dense_workspace_bytes, 64-byte aligned */
} polyspec_dense_product_params;

/* -1 for an invalid shape or a negative number of tokens. */
POLYSPEC_API int64_t polyspec_dense_packed_bytes(const polyspec_dense_shape* shape);
POLYSPEC_API int64_t polyspec_dense_workspace_bytes(const polyspec_dense_shape* shape,
                                                    int64_t tokens);

POLYSPEC_API polyspec_code polyspec_dense_pack(const polyspec_dense_pack_params* params);
POLYSPEC_API polyspec_code polyspec_dense_packed_check(const polyspec_dense_shape* shape,
                                                       const void* packed, int64_t bytes);

/* y = x W^T + b. stream NULL: serially. On CUDA in bfloat16, for up to 16 tokens (dense.hpp). */
POLYSPEC_API polyspec_code polyspec_dense_product(const polyspec_dense_product_params* params,
                                                  const polyspec_stream* stream);

/* ---- 4-bit product ---- */

/* A matrix [n, k] of 4-bit numbers in groups along the inputs; int4.hpp has the layout, the bound
 * of the product and the differences on CUDA. */
typedef struct polyspec_int4_shape {
  size_t struct_size;
  int64_t outputs;     /* n >= 1 */
  int64_t inputs;      /* k, a positive multiple of group */
  int32_t group;       /* 32, 64, 128 (default) or 256 */
  int32_t scale_dtype; /* POLYSPEC_FLOAT32 or POLYSPEC_BFLOAT16 (default) */
} polyspec_int4_shape;

typedef struct polyspec_int4_round_params {
  size_t struct_size;
  const polyspec_int4_shape* shape;
  int32_t dtype;           /* of the weights; default POLYSPEC_FLOAT32 */
  const void* weights;     /* [n, k], unit stride along k */
  int64_t stride;          /* elements from one output to the next */
  const float* importance; /* [k] >= 0, of the squared errors, or NULL: all count alike */
  uint8_t* values;         /* [n, k] out */
  float* scales;           /* [n, k / group] out */
  float* zeros;            /* [n, k / group] out */
} polyspec_int4_round_params;

typedef struct polyspec_int4_pack_params {
  size_t struct_size;
  const polyspec_int4_shape* shape;
  const uint8_t* values; /* [n, k] q in [0, 16) */
  const float* scales;   /* [n, k / group] */
  const float* zeros;    /* [n, k / group] */
  uint8_t* packed;       /* out; polyspec_int4_packed_bytes, 64-byte aligned */
} polyspec_int4_pack_params;

typedef struct polyspec_int4_unpack_params {
  size_t struct_size;
  const polyspec_int4_shape* shape;
  const uint8_t* packed;
  uint8_t* values; /* [n, k] out */
  float* scales;   /* [n, k / group] out */
  float* zeros;    /* [n, k / group] out */
} polyspec_int4_unpack_params;

typedef struct polyspec_int4_product_params {
  size_t struct_size;
  const polyspec_int4_shape* shape;
  int64_t tokens;        /* m >= 0 */
  int32_t dtype;         /* of x and y; default POLYSPEC_FLOAT32 */
  const void* x;         /* [m, k], unit stride along k */
  int64_t x_stride;      /* elements from one token to the next, >= k */
  const uint8_t* packed; /* as polyspec_int4_pack wrote it, 64-byte aligned */
  void* y;               /* [m, n] out, unit stride along n; apart from all that is read */
  int64_t y_stride;      /* elements from one token to the next, >= n */
  void* workspace;       /* polyspec_int4_workspace_bytes, 64-byte aligned; none on CUDA */
} polyspec_int4_product_params;

/* -1 for an invalid shape or a negative number of tokens. */
POLYSPEC_API int64_t polyspec_int4_packed_bytes(const polyspec_int4_shape* shape);
POLYSPEC_API int64_t polyspec_int4_workspace_bytes(const polyspec_int4_shape* shape,
                                                   int64_t tokens);

/* Rounds weights to the nearest 4-bit numbers. stream NULL: serially. */
POLYSPEC_API polyspec_code polyspec_int4_round(const polyspec_int4_round_params* params,
                                               const polyspec_stream* stream);
POLYSPEC_API polyspec_code polyspec_int4_pack(const polyspec_int4_pack_params* params);
/* The same for products on a device, POLYSPEC_CPU or POLYSPEC_CUDA; the stream is of the device. */
POLYSPEC_API int64_t polyspec_int4_packed_bytes_on(const polyspec_int4_shape* shape,
                                                   int32_t device);
POLYSPEC_API polyspec_code polyspec_int4_pack_on(const polyspec_int4_pack_params* params,
                                                 const polyspec_stream* stream);
POLYSPEC_API polyspec_code polyspec_int4_unpack(const polyspec_int4_unpack_params* params);
POLYSPEC_API polyspec_code polyspec_int4_packed_check(const polyspec_int4_shape* shape,
                                                      const void* packed, int64_t bytes);

/* y = x W^T, w = (q - 8) scale + zero. stream NULL: serially. */
POLYSPEC_API polyspec_code polyspec_int4_product(const polyspec_int4_product_params* params,
                                                 const polyspec_stream* stream);

/* ---- Attention ---- */

/* A few queries per row over a cache of keys and values; attention.hpp has the order of the sums,
 * and the alignment that CUDA wants. */
typedef struct polyspec_attention_params {
  size_t struct_size;
  int64_t batch;  /* b >= 0 */
  int64_t heads;  /* h, a positive multiple of groups */
  int64_t groups; /* heads of keys and values */
  int64_t tokens; /* t >= 0 */
  int64_t length; /* n >= 1 */
  int64_t width;  /* d of a key, e of a value: multiples of 32 in [32, 256] */
  int64_t value_width;
  int32_t dtype;           /* of all tensors; POLYSPEC_FLOAT32 (default) or POLYSPEC_BFLOAT16 */
  int32_t causal;          /* not 0: token t sees keys [0, n - tokens + t] only */
  float scale;             /* of the scores; default 1 */
  const void* query;       /* [b, h, t, d], unit stride along d */
  const void* key;         /* [b, groups, n, d], unit stride along d */
  const void* value;       /* [b, groups, n, e], unit stride along e */
  const void* mask;        /* [b, t, n], unit stride along n; or NULL: nothing is hidden */
  int64_t query_stride[3]; /* elements from one row, head and token to the next */
  int64_t key_stride[3];
  int64_t value_stride[3];
  int64_t mask_stride[2]; /* from one row and token to the next; 0: the same for all */
  void* out;              /* [b, t, h, e] out, contiguous */
  void* workspace;        /* polyspec_attention_workspace_bytes(params) to spread spans of keys as
                             well, 64-byte aligned; or NULL */
  const int64_t* lengths; /* [b], without causal: token t of row b sees keys [0, lengths[b] + t]
                             only; or NULL */
} polyspec_attention_params;

/* -1 for parameters that are refused. */
POLYSPEC_API int64_t polyspec_attention_workspace_bytes(const polyspec_attention_params* params);

/* stream NULL: serially. Each thread of the CPU needs 144 KiB of stack. */
POLYSPEC_API polyspec_code polyspec_attention(const polyspec_attention_params* params,
                                              const polyspec_stream* stream);

/* ---- Caches of keys and values ---- */

/* kv_cache.hpp describes each operator. A contiguous cache rolls back by its lengths alone, so
 * there is no operator for it; a paged one by polyspec_truncate_pages. Elements are opaque: 1, 2 or
 * 4 bytes, moved as they are. */

/* Bits of these operators' status, in addition to POLYSPEC_STATUS_BAD_LENGTH. A row with an error
 * keeps its length, its pages and the keys and values of its committed tokens. */
enum {
  POLYSPEC_STATUS_CACHE_FULL = 1 << 11,
  POLYSPEC_STATUS_BAD_PAGE = 1 << 12,
  POLYSPEC_STATUS_BAD_PATH = 1 << 10,
};

/* Rows of vectors, unit stride along the vector. These structs never change. */
typedef struct polyspec_kv_source {
  const void* data;
  int64_t stride[3]; /* elements */
} polyspec_kv_source;

typedef struct polyspec_kv_cache {
  void* data;
  int64_t stride[3]; /* elements */
} polyspec_kv_cache;

/* Fields common to both append operators. */
typedef struct polyspec_new_tokens {
  size_t struct_size;
  int64_t batch;             /* b >= 0 */
  int64_t heads;             /* h >= 1, of keys and values */
  int64_t tokens;            /* t >= 0 */
  int64_t key_dim;           /* d_k >= 1 */
  int64_t value_dim;         /* d_v >= 1 */
  int32_t element_size;      /* 1, 2 or 4 bytes */
  polyspec_kv_source keys;   /* [b, h, t, d_k] */
  polyspec_kv_source values; /* [b, h, t, d_v] */
  const int64_t* lengths;    /* [b] tokens that each row holds already */
  const int64_t* counts;     /* [b] in [0, t], or NULL: t each */
  int64_t* new_lengths;      /* [b] out, or NULL; not `lengths` */
  int32_t* status;           /* [b] out */
} polyspec_new_tokens;

typedef struct polyspec_append_params {
  size_t struct_size;
  const polyspec_new_tokens* in;
  int64_t capacity;         /* c >= 1 */
  int32_t ring;             /* not 0: the oldest tokens after the sinks are displaced */
  int64_t sinks;            /* in [0, c); only with ring */
  polyspec_kv_cache keys;   /* [b, h, c, d_k] */
  polyspec_kv_cache values; /* [b, h, c, d_v] */
} polyspec_append_params;

typedef struct polyspec_paged_append_params {
  size_t struct_size;
  const polyspec_new_tokens* in;
  int64_t pages;              /* n in [1, 2^31) */
  int64_t page_size;          /* s >= 1 tokens */
  int64_t max_pages;          /* m >= 0, pages that a row can hold */
  polyspec_kv_cache keys;     /* [n, h, s, d_k] */
  polyspec_kv_cache values;   /* [n, h, s, d_v] */
  const int32_t* block_table; /* [b, m] page ids */
  int64_t block_table_stride; /* from one row to the next */
} polyspec_paged_append_params;

typedef struct polyspec_pages_params {
  size_t struct_size;
  int64_t batch;          /* b >= 0 */
  int64_t pages;          /* n in [1, 2^31) */
  int64_t page_size;      /* s >= 1 tokens */
  int64_t max_pages;      /* m >= 0 */
  const int64_t* lengths; /* [b] tokens that each row must be able to hold, or is cut to */
  int32_t* block_table;   /* [b, m] in and out; -1 where a page was taken back */
  int64_t block_table_stride;
  int64_t* held;       /* [b] in and out; row b holds pages block_table[b, 0 ... held[b]) */
  int32_t* free_pages; /* [n] in and out; a stack of the free page ids */
  int64_t* free_count; /* [1] in and out */
  int32_t* status;     /* [b] out */
} polyspec_pages_params;

typedef struct polyspec_compact_tree_params {
  size_t struct_size;
  int64_t layers;        /* l >= 0 */
  int64_t batch;         /* b >= 0 */
  int64_t heads;         /* h >= 1 */
  int64_t capacity;      /* c >= 1 */
  int64_t key_dim;       /* d_k >= 1 */
  int64_t value_dim;     /* d_v >= 1 */
  int32_t element_size;  /* 1, 2 or 4 bytes */
  void* const* keys;     /* [l] base of each layer's [b, h, c, d_k], where the call runs */
  void* const* values;   /* [l] of [b, h, c, d_v] */
  int64_t key_stride[3]; /* elements, of every layer */
  int64_t value_stride[3];
  int32_t alignment;      /* bytes that every base is a multiple of; a power of two; default 16 */
  int64_t path_len;       /* m >= 0 */
  const int64_t* lengths; /* [b] committed tokens before the tree */
  const int64_t* path;    /* [b, m] accepted nodes, then -1 */
  int64_t* new_lengths;   /* [b] out, or NULL; not `lengths` */
  int32_t* status;        /* [b] out */
} polyspec_compact_tree_params;

/* stream NULL: the CPU, serially. */
POLYSPEC_API polyspec_code polyspec_append(const polyspec_append_params* params,
                                           const polyspec_stream* stream);
POLYSPEC_API polyspec_code polyspec_append_paged(const polyspec_paged_append_params* params,
                                                 const polyspec_stream* stream);
POLYSPEC_API polyspec_code polyspec_reserve_pages(const polyspec_pages_params* params,
                                                  const polyspec_stream* stream);
POLYSPEC_API polyspec_code polyspec_truncate_pages(const polyspec_pages_params* params,
                                                   const polyspec_stream* stream);
POLYSPEC_API polyspec_code polyspec_compact_tree(const polyspec_compact_tree_params* params,
                                                 const polyspec_stream* stream);

/* ---- Round state ---- */

/* The scheduler of a batch: one row of int64 words for each request, on the CPU or a device.
 * round_state.hpp describes the words and the order of the three operators. */
typedef struct polyspec_round {
  size_t struct_size;
  int32_t levels;   /* n in [2, 2^16) */
  int64_t steps;    /* s >= 0, steps that the log has room for */
  int64_t capacity; /* c >= 0, tokens that the text has room for */
  int64_t batch;    /* b >= 0 */
  int64_t* state;   /* [b, polyspec_round_words] in and out */
} polyspec_round;

/* Words of the header, of a level, of a step in the log. Level i begins at polyspec_round_level_at,
 * the log after level n, the text at polyspec_round_text_at. */
enum {
  POLYSPEC_ROUND_TOTAL = 0,
  POLYSPEC_ROUND_ROOM,
  POLYSPEC_ROUND_STOPPED,
  POLYSPEC_ROUND_STEP,
  POLYSPEC_ROUND_TAIL_WINDOW,
  POLYSPEC_ROUND_TAIL_PENDING,
  POLYSPEC_ROUND_HEADER_WORDS
};
enum {
  POLYSPEC_ROUND_CACHED = 0,
  POLYSPEC_ROUND_ROUND,
  POLYSPEC_ROUND_WINDOW,
  POLYSPEC_ROUND_BOUND,
  POLYSPEC_ROUND_PENDING,
  POLYSPEC_ROUND_BLOCKS,
  POLYSPEC_ROUND_CLOSED,
  POLYSPEC_ROUND_LEVEL_WORDS
};
enum {
  POLYSPEC_ROUND_COUNT = 0,
  POLYSPEC_ROUND_POSITION,
  POLYSPEC_ROUND_ACCEPTED,
  POLYSPEC_ROUND_EMITTED,
  POLYSPEC_ROUND_ENDED,
  POLYSPEC_ROUND_STATUS,
  POLYSPEC_ROUND_OF_TAIL,
  POLYSPEC_ROUND_STEP_WORDS
};

static inline int64_t polyspec_round_level_at(int32_t level) {
  return POLYSPEC_ROUND_HEADER_WORDS + (level - 1) * (int64_t)POLYSPEC_ROUND_LEVEL_WORDS;
}
static inline int64_t polyspec_round_text_at(const polyspec_round* round) {
  return polyspec_round_level_at(round->levels + 1) + round->steps * POLYSPEC_ROUND_STEP_WORDS;
}
/* Of one row. */
static inline int64_t polyspec_round_words(const polyspec_round* round) {
  return polyspec_round_text_at(round) + round->capacity;
}

/* Rows of the table that polyspec_schedule_next fills, each [b]. */
enum {
  POLYSPEC_PLAN_PART = 0,
  POLYSPEC_PLAN_COUNTS,
  POLYSPEC_PLAN_FIRST,
  POLYSPEC_PLAN_LENGTHS,
  POLYSPEC_PLAN_POSITIONS,
  POLYSPEC_PLAN_ROUNDS,
  POLYSPEC_PLAN_OF_TAIL,
  POLYSPEC_PLAN_ROWS
};

typedef struct polyspec_schedule_due_params {
  size_t struct_size;
  const polyspec_round* in;
  int64_t* due; /* [2, b] out; the level of the due step, 0: nothing is left; and its number of
                   tokens */
} polyspec_schedule_due_params;

typedef struct polyspec_schedule_next_params {
  size_t struct_size;
  const polyspec_round* in;
  int32_t level;      /* of the step */
  int64_t width;      /* t >= 1 */
  int64_t* input_ids; /* [b, t] out, 0 after the row's tokens */
  int64_t* plan;      /* [POLYSPEC_PLAN_ROWS, b] out */
  int64_t most;       /* m >= 0, tokens that a row verifies at most */
  int64_t* pending;   /* [b, m] out, these, then 0 */
} polyspec_schedule_next_params;

typedef struct polyspec_schedule_report_params {
  size_t struct_size;
  const polyspec_round* in;
  int32_t level;         /* of the step's polyspec_schedule_next */
  const int64_t* plan;   /* [POLYSPEC_PLAN_ROWS, b] of it */
  int64_t width;         /* w >= 1 */
  const int64_t* tokens; /* [b, w] drafted, or emitted by the verification */
  const int64_t* counts; /* [b] accepted; of a draft, proposed, or NULL: as many as asked for */
  const int32_t* status; /* [b] of the verification, [b, w] of the draft's tokens */
  int64_t num_eos;       /* e >= 0 */
  const int64_t* eos;    /* [b, e] ids that end a row's text; -1 is none */
  int64_t* appended;     /* [2, b] out; tokens that were pending for the level above, and how many
                            follow them */
  int64_t* kept;         /* [n, b] out, or NULL; tokens that each level's cache may keep */
} polyspec_schedule_report_params;

/* stream NULL: the CPU. */
POLYSPEC_API polyspec_code polyspec_schedule_due(const polyspec_schedule_due_params* params,
                                                 const polyspec_stream* stream);
POLYSPEC_API polyspec_code polyspec_schedule_next(const polyspec_schedule_next_params* params,
                                                  const polyspec_stream* stream);
POLYSPEC_API polyspec_code polyspec_schedule_report(const polyspec_schedule_report_params* params,
                                                    const polyspec_stream* stream);

/* ---- Scheduler ---- */

/* The host state machine of a chain of n levels, level 1 the target, level n the drafter. Not to be
 * used from two threads at once. scheduler.hpp describes each step. */
typedef struct polyspec_scheduler polyspec_scheduler;

enum { POLYSPEC_STEP_DRAFT = 0, POLYSPEC_STEP_VERIFY = 1, POLYSPEC_STEP_DONE = 2 };

typedef struct polyspec_step {
  size_t struct_size; /* set by the caller; no more than this many bytes are written */
  int32_t kind;       /* POLYSPEC_STEP_* */
  int32_t level;      /* 1 ... n */
  int64_t count;      /* tokens to draft, >= 1, or pending tokens to verify, >= 0 */
  int64_t of_tail;    /* of these, tokens of a tail: all or none of a draft, which are then pending
                         for level 1, and the last of the tokens that level 1 verifies */
} polyspec_step;

/* The size of an earlier release that is written: all fields before `of_tail`. */
#define POLYSPEC_STEP_WITHOUT_TAIL_SIZE offsetof(polyspec_step, of_tail)

/* windows: [num_windows], n - 1 numbers >= 0: level i waits for windows[i-1] tokens. */
POLYSPEC_API polyspec_code polyspec_scheduler_create(const int64_t* windows, int32_t num_windows,
                                                     polyspec_scheduler** scheduler);

/* The same, and rounds: [num_windows] numbers >= 0: level i also verifies its pending tokens once
 * rounds[i-1] blocks have come from below, full window or not; 0 is no bound. */
POLYSPEC_API polyspec_code polyspec_scheduler_create_bounded(const int64_t* windows,
                                                             const int64_t* rounds,
                                                             int32_t num_windows,
                                                             polyspec_scheduler** scheduler);
POLYSPEC_API void polyspec_scheduler_destroy(polyspec_scheduler* scheduler); /* NULL is allowed */

/* Begins a request of max_new_tokens >= 0 tokens. */
POLYSPEC_API polyspec_code polyspec_scheduler_start(polyspec_scheduler* scheduler,
                                                    int64_t max_new_tokens);

/* The next step; changes nothing. */
POLYSPEC_API polyspec_code polyspec_scheduler_next(const polyspec_scheduler* scheduler,
                                                   polyspec_step* step);

/* The outcome of a step: `emitted` tokens were drafted, or handed up (accepted and correction or
 * bonus, cut after the first EOS); eos != 0: the last of them ends the text. */
POLYSPEC_API polyspec_code polyspec_scheduler_report(polyspec_scheduler* scheduler, int32_t level,
                                                     int64_t emitted, int32_t eos);

/* windows: [num_windows] as at creation, and as many; they hold from the next step on. */
POLYSPEC_API polyspec_code polyspec_scheduler_set_windows(polyspec_scheduler* scheduler,
                                                          const int64_t* windows,
                                                          int32_t num_windows);

/* With a tail, level n drafts up to `tail` tokens more before level 1 verifies the tokens of level
 * 2; level 1 verifies the drafts as well, each against the distribution of level n that it was
 * drawn from. It holds from the next one on; 0, as at creation, is none. A chain of two levels has
 * none. */
POLYSPEC_API polyspec_code polyspec_scheduler_set_tail(polyspec_scheduler* scheduler, int64_t tail);

/* windows: [num_windows] out, num_windows = n - 1. */
POLYSPEC_API polyspec_code polyspec_scheduler_get_windows(const polyspec_scheduler* scheduler,
                                                          int64_t* windows, int32_t num_windows);

/* Tokens that wait for level 1 ... n-1, for level 1 a tail's as well; tokens that the target has
 * emitted; 1 when nothing is left to do; the number n of levels; tokens of a tail at most. They
 * answer -1 for a NULL scheduler or a level that has no pending tokens. */
POLYSPEC_API int64_t polyspec_scheduler_pending(const polyspec_scheduler* scheduler, int32_t level);
POLYSPEC_API int64_t polyspec_scheduler_committed(const polyspec_scheduler* scheduler);
POLYSPEC_API int32_t polyspec_scheduler_done(const polyspec_scheduler* scheduler);
POLYSPEC_API int32_t polyspec_scheduler_levels(const polyspec_scheduler* scheduler);
POLYSPEC_API int64_t polyspec_scheduler_tail(const polyspec_scheduler* scheduler);

/* ---- Window policies ---- */

/* Chooses the windows of a chain's rounds from the past rounds; policy.hpp describes the kinds and
 * the options. Not to be used from two threads at once. */
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
  double guard_share;
} polyspec_policy_options;

/* One step that a row took part in. This struct never changes. */
typedef struct polyspec_step_report {
  int32_t level;    /* 1 ... n; n drafted, the others verified */
  int32_t repeated; /* not 0: another row's report has the time, or it is one row's and passed while
                       the level read tokens that it had missed */
  int64_t tokens;   /* verified or drafted in this row */
  int64_t accepted; /* of the verified tokens */
  int64_t width;    /* the most tokens of any row in the step */
  int64_t batch;    /* rows that took part */
  double seconds;   /* wall time of the step for all its rows; 0: not measured */
} polyspec_step_report;

typedef struct polyspec_round_report {
  size_t struct_size;
  int64_t row;    /* its index in the batch, in [0, 2^16); numbers are used again */
  int32_t begins; /* not 0: a text begins in the row; its history is forgotten */
  const polyspec_step_report* steps; /* [num_steps] of the round that is over */
  int64_t num_steps;
  const int64_t* tokens; /* [num_tokens] committed by it; the prompt where it begins */
  int64_t num_tokens;
  int64_t
      batch; /* rows reported before the next round, which take its steps together; 0 or 1: one */
} polyspec_round_report;

POLYSPEC_API polyspec_code polyspec_policy_create(const polyspec_policy_options* options,
                                                  polyspec_policy** policy);
POLYSPEC_API void polyspec_policy_destroy(polyspec_policy* policy);        /* NULL is allowed */
POLYSPEC_API polyspec_code polyspec_policy_reset(polyspec_policy* policy); /* all rows, all times */

/* Forgets one row; its next report then begins a text; statistics of all rows stay. */
POLYSPEC_API polyspec_code polyspec_policy_forget_row(polyspec_policy* policy, int64_t row);

/* windows: [num_windows] out, num_windows = n - 1; for polyspec_scheduler_set_windows. */
POLYSPEC_API polyspec_code polyspec_policy_next(polyspec_policy* policy,
                                                const polyspec_round_report* report,
                                                int64_t* windows, int32_t num_windows);

/* ---- Defaults ---- */

/* polyspec_<struct>_default() for every struct with a struct_size. In the header, so that the size
 * is the caller's. */

#define POLYSPEC_DEFAULT_ZEROS(name)                              \
  static inline polyspec_##name polyspec_##name##_default(void) { \
    polyspec_##name out;                                          \
    memset(&out, 0, sizeof out);                                  \
    out.struct_size = sizeof out;                                 \
    return out;                                                   \
  }

POLYSPEC_DEFAULT_ZEROS(stream)
POLYSPEC_DEFAULT_ZEROS(sample_params)
POLYSPEC_DEFAULT_ZEROS(verify_params)
POLYSPEC_DEFAULT_ZEROS(verify_tree_params)
POLYSPEC_DEFAULT_ZEROS(dense_shape)
POLYSPEC_DEFAULT_ZEROS(dense_pack_params)
POLYSPEC_DEFAULT_ZEROS(dense_product_params)
POLYSPEC_DEFAULT_ZEROS(int4_round_params)
POLYSPEC_DEFAULT_ZEROS(int4_pack_params)
POLYSPEC_DEFAULT_ZEROS(int4_unpack_params)
POLYSPEC_DEFAULT_ZEROS(int4_product_params)
POLYSPEC_DEFAULT_ZEROS(new_tokens)
POLYSPEC_DEFAULT_ZEROS(append_params)
POLYSPEC_DEFAULT_ZEROS(paged_append_params)
POLYSPEC_DEFAULT_ZEROS(pages_params)
POLYSPEC_DEFAULT_ZEROS(round)
POLYSPEC_DEFAULT_ZEROS(schedule_due_params)
POLYSPEC_DEFAULT_ZEROS(schedule_next_params)
POLYSPEC_DEFAULT_ZEROS(schedule_report_params)
POLYSPEC_DEFAULT_ZEROS(step)
POLYSPEC_DEFAULT_ZEROS(round_report)

#undef POLYSPEC_DEFAULT_ZEROS

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

static inline polyspec_int4_shape polyspec_int4_shape_default(void) {
  polyspec_int4_shape out;
  memset(&out, 0, sizeof out);
  out.struct_size = sizeof out;
  out.group = 128;
  out.scale_dtype = POLYSPEC_BFLOAT16;
  return out;
}

static inline polyspec_attention_params polyspec_attention_params_default(void) {
  polyspec_attention_params out;
  memset(&out, 0, sizeof out);
  out.struct_size = sizeof out;
  out.scale = 1.0f;
  return out;
}

static inline polyspec_compact_tree_params polyspec_compact_tree_params_default(void) {
  polyspec_compact_tree_params out;
  memset(&out, 0, sizeof out);
  out.struct_size = sizeof out;
  out.alignment = 16;
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
  out.guard_share = 0.02;
  return out;
}

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* POLYSPEC_POLYSPEC_H_ */

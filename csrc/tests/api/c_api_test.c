/* The C interface, compiled as C99: struct sizes, codes, texts, one draw with a known answer, a
 * verification, a chain of three toy levels, and the executor. Ends with status 0, or 1 after the
 * first failed check. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "polyspec/polyspec.h"
#include "support/c_check.h"

enum { V = 4 };
static const float kLogits[V] = {-0.5f, 1.0f, 1.0f, -2.0f}; /* a tie: greedy takes id 1 */
static const float kUp[V] = {0.0f, -1.0f, 0.5f, -3.0f};

/* Outputs start poisoned, so that nothing is taken for written that was not. */
struct outputs {
  int64_t tokens[8];
  int64_t accepted;
  float logprobs[8];
  int32_t status;
  polyspec_row_statistics statistics[8];
};

static struct outputs poisoned(void) {
  struct outputs out;
  memset(&out, 0x5a, sizeof out);
  return out;
}

static polyspec_sample_params sample_of(const float* logits, struct outputs* out) {
  polyspec_sample_params p = polyspec_sample_params_default();
  p.batch = 1;
  p.vocab = V;
  p.logits = logits;
  p.tokens = out->tokens;
  p.logprobs = out->logprobs;
  p.status = &out->status;
  p.statistics = out->statistics;
  return p;
}

static void test_texts(void) {
  char text[64], expected[32];
  snprintf(expected, sizeof expected, "%d.%d.%d", POLYSPEC_VERSION_MAJOR, POLYSPEC_VERSION_MINOR,
           POLYSPEC_VERSION_PATCH);
  CHECK(strcmp(polyspec_version(), expected) == 0);
#ifdef EXPECTED_VERSION /* of the package that the build found */
  CHECK(strcmp(polyspec_version(), EXPECTED_VERSION) == 0);
#endif
  CHECK(polyspec_has_cuda() == 0 || polyspec_has_cuda() == 1);
  CHECK(strcmp(polyspec_last_error(), "") == 0);
  CHECK(strcmp(polyspec_code_string(POLYSPEC_BAD_STRUCT_SIZE), "bad struct size") == 0);
  CHECK(strcmp(polyspec_code_string(-5), "unknown code") == 0);

  CHECK(polyspec_status_string(0, text, sizeof text) == 2 && strcmp(text, "ok") == 0);
  const char* both = "NaN in a row of logits, the row is the draft's";
  const int32_t bits = POLYSPEC_STATUS_NAN | POLYSPEC_STATUS_DRAFT_ROW;
  CHECK(polyspec_status_string(bits, text, sizeof text) == strlen(both) && strcmp(text, both) == 0);
  memset(text, 'x', sizeof text);
  CHECK(polyspec_status_string(bits, text, 6) == strlen(both) && strcmp(text, "NaN i") == 0);
  CHECK(text[6] == 'x');
  CHECK(polyspec_status_string(bits, NULL, 0) == strlen(both));
  /* No operator has a bit of another's. */
  polyspec_status_string(POLYSPEC_STATUS_CACHE_FULL, text, sizeof text);
  CHECK(strcmp(text, "cache full, or no page is free") == 0);
  int32_t all = POLYSPEC_STATUS_BAD_PATH | POLYSPEC_STATUS_CACHE_FULL | POLYSPEC_STATUS_BAD_PAGE;
  CHECK((all & (POLYSPEC_STATUS_BAD_INDEX | POLYSPEC_STATUS_BAD_TREE)) == 0);
  all |= ((POLYSPEC_STATUS_BAD_TREE << 1) - 1) | POLYSPEC_STATUS_ZERO_RESIDUAL;
  char every[1024];
  CHECK(polyspec_status_string(all, every, sizeof every) < sizeof every);
  CHECK(strstr(every, "unknown") == NULL);
  CHECK(polyspec_status_string(1 << 30, text, sizeof text) == 12 &&
        strcmp(text, "unknown bits") == 0);
}

static void test_struct_sizes(void) {
  struct outputs out = poisoned(), before = poisoned();
  polyspec_sample_params p = sample_of(kLogits, &out);
  polyspec_sampling sampling = polyspec_sampling_default();
  sampling.temperature.value = 0;
  p.sampling = &sampling;

  const size_t bad[] = {0,
                        1,
                        8,
                        POLYSPEC_SAMPLE_PARAMS_MIN_SIZE - 1,
                        POLYSPEC_SAMPLE_PARAMS_MIN_SIZE + 1,
                        sizeof p - 1,
                        (size_t)-1};
  for (size_t i = 0; i < sizeof bad / sizeof bad[0]; ++i) {
    p.struct_size = bad[i];
    CHECK_CODE(POLYSPEC_BAD_STRUCT_SIZE, polyspec_sample(&p, NULL));
    CHECK(strstr(polyspec_last_error(), "struct_size") != NULL);
  }
  CHECK(memcmp(&out, &before, sizeof out) == 0); /* nothing was written */

  /* An earlier release has no `statistics`: memory after its last field must not be read. */
  p.struct_size = POLYSPEC_SAMPLE_PARAMS_MIN_SIZE;
  CHECK_CODE(POLYSPEC_OK, polyspec_sample(&p, NULL));
  CHECK(out.tokens[0] == 1 && out.status == 0);
  CHECK(memcmp(&out.statistics, &before.statistics, sizeof out.statistics) == 0);

  p.struct_size = sizeof p;
  CHECK_CODE(POLYSPEC_OK, polyspec_sample(&p, NULL));
  CHECK(out.statistics[0].mass == 1); /* one-hot */

  /* A later release: fine while its new fields are zero. */
  struct {
    polyspec_sample_params known;
    char later[16];
  } grown;
  memset(&grown, 0, sizeof grown);
  grown.known = p;
  grown.known.struct_size = sizeof grown;
  CHECK_CODE(POLYSPEC_OK, polyspec_sample(&grown.known, NULL));
  grown.later[15] = 1;
  CHECK_CODE(POLYSPEC_BAD_STRUCT_SIZE, polyspec_sample(&grown.known, NULL));

  /* The structs that the pointers name, and the outer one of verify and step. */
  sampling.struct_size = 4;
  CHECK_CODE(POLYSPEC_BAD_STRUCT_SIZE, polyspec_sample(&p, NULL));
  sampling.struct_size = sizeof sampling;
  polyspec_draw draw = polyspec_draw_default();
  draw.struct_size -= 1;
  p.draw = &draw;
  CHECK_CODE(POLYSPEC_BAD_STRUCT_SIZE, polyspec_sample(&p, NULL));
  p.draw = NULL;
  polyspec_stream stream = polyspec_stream_default();
  stream.struct_size = 0;
  CHECK_CODE(POLYSPEC_BAD_STRUCT_SIZE, polyspec_sample(&p, &stream));
  polyspec_verify_params verify = polyspec_verify_params_default();
  verify.struct_size = POLYSPEC_VERIFY_PARAMS_MIN_SIZE - 8;
  CHECK_CODE(POLYSPEC_BAD_STRUCT_SIZE, polyspec_verify(&verify, NULL));
}

static void test_sample(void) {
  struct outputs out = poisoned();
  polyspec_sample_params p = sample_of(kLogits, &out);
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_sample(NULL, NULL));
  p.logits = NULL;
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_sample(&p, NULL));
  CHECK(strncmp(polyspec_last_error(), "polyspec_sample: ", 17) == 0);
  p = sample_of(kLogits, &out);
  p.dtype = 7;
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_sample(&p, NULL));

  /* The caller's draws through the inverse CDF in ascending id: both ends of the distribution. */
  p = sample_of(kLogits, &out);
  double sum = 0;
  for (int x = 0; x < V; ++x) sum += exp((double)kLogits[x]);
  polyspec_draw draw = polyspec_draw_default();
  uint64_t bits = 0;
  draw.bits = &bits;
  p.draw = &draw;
  CHECK_CODE(POLYSPEC_OK, polyspec_sample(&p, NULL));
  CHECK(out.tokens[0] == 0 && fabs(out.logprobs[0] - (-0.5 - log(sum))) < 1e-6);
  bits = UINT64_MAX;
  CHECK_CODE(POLYSPEC_OK, polyspec_sample(&p, NULL));
  CHECK(out.tokens[0] == 3 && fabs(out.logprobs[0] - (-2.0 - log(sum))) < 1e-6);
  CHECK(out.statistics[0].max == 1.0f && out.statistics[0].mass > 1);

  /* top-k 2 keeps the tie only; per-request values win over the scalar. */
  const int64_t top_k = 2;
  polyspec_sampling sampling = polyspec_sampling_default();
  sampling.top_k.data = &top_k;
  p.sampling = &sampling;
  CHECK_CODE(POLYSPEC_OK, polyspec_sample(&p, NULL));
  CHECK(out.tokens[0] == 2 && fabs(out.logprobs[0] - log(0.5)) < 1e-6);

  /* The node is part of the key, and a caller of the release before has none. */
  draw.bits = NULL;
  p.sampling = NULL;
  int differ = 0;
  for (int64_t node = 0; node < 64; ++node) {
    p.node.value = node;
    CHECK_CODE(POLYSPEC_OK, polyspec_sample(&p, NULL));
    const int64_t token = out.tokens[0];
    p.struct_size = POLYSPEC_SAMPLE_PARAMS_NODELESS_SIZE;
    CHECK_CODE(POLYSPEC_OK, polyspec_sample(&p, NULL));
    p.struct_size = sizeof p;
    differ += token != out.tokens[0];
    CHECK(node > 0 || differ == 0);
  }
  CHECK(differ > 10);
  p.node.value = 1 << 14;
  CHECK_CODE(POLYSPEC_OK, polyspec_sample(&p, NULL));
  CHECK(out.status == POLYSPEC_STATUS_BAD_PARAMETER);
  p.node.value = 0;
  p.sampling = &sampling;

  /* Of the allowed ids the likeliest two stay; a caller of the release before has no mask. */
  const int32_t allowed = ~(1 << 2);
  p.allowed = &allowed;
  p.allowed_stride = 1;
  CHECK_CODE(POLYSPEC_OK, polyspec_sample(&p, NULL));
  CHECK(out.status == 0 && out.tokens[0] != 2);
  const int32_t nothing = 0;
  p.allowed = &nothing;
  CHECK_CODE(POLYSPEC_OK, polyspec_sample(&p, NULL));
  CHECK(out.status == POLYSPEC_STATUS_EMPTY_ROW && out.tokens[0] == -1);
  p.struct_size = POLYSPEC_SAMPLE_PARAMS_MASKLESS_SIZE;
  CHECK_CODE(POLYSPEC_OK, polyspec_sample(&p, NULL));
  CHECK(out.status == 0);
  p.struct_size = sizeof p;
  p.allowed = NULL;

  /* The key: seeds and levels lead to different draws, the same key to the same. */
  draw.bits = NULL;
  sampling = polyspec_sampling_default();
  int seen[2][V] = {{0}};
  for (uint64_t seed = 0; seed < 64; ++seed) {
    draw.seed.value = seed;
    for (int32_t level = 1; level <= 2; ++level) {
      draw.level = level;
      CHECK_CODE(POLYSPEC_OK, polyspec_sample(&p, NULL));
      const int64_t token = out.tokens[0];
      CHECK_CODE(POLYSPEC_OK, polyspec_sample(&p, NULL));
      CHECK(token == out.tokens[0] && token >= 0 && token < V);
      ++seen[level - 1][token];
    }
  }
  CHECK(seen[0][1] > 0 && seen[0][2] > 0 && memcmp(seen[0], seen[1], sizeof seen[0]) != 0);

  /* A row without a distribution is a status of the request, not a failure of the call. */
  const float nan_row[V] = {0, NAN, 0, 0};
  p = sample_of(nan_row, &out);
  CHECK_CODE(POLYSPEC_OK, polyspec_sample(&p, NULL));
  CHECK(out.status == POLYSPEC_STATUS_NAN && out.tokens[0] == -1);

  polyspec_stream stream = polyspec_stream_default();
  stream.device = 9;
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_sample(&p, &stream));
  if (!polyspec_has_cuda()) {
    stream.device = POLYSPEC_CUDA;
    const polyspec_code code = polyspec_sample(&p, &stream);
    CHECK(code == POLYSPEC_UNSUPPORTED || code == POLYSPEC_CUDA_ERROR);
  }
}

/* The pool's rows at temperature 1, and an id out of it. */
static void test_pool_at_one(const polyspec_verify_params* given, const polyspec_sampling* sampling,
                             struct outputs* out) {
  polyspec_verify_params p = *given;
  polyspec_sampling warm = *sampling;
  const float one[2] = {-1.0f, 1.0f};
  warm.temperature.data = one;
  p.sampling = &warm;
  CHECK_CODE(POLYSPEC_OK, polyspec_verify(&p, NULL));
  CHECK(out->status == 0);
  const int64_t outside[3] = {2, 2, 2};
  p.draft_rows = outside;
  CHECK_CODE(POLYSPEC_OK, polyspec_verify(&p, NULL));
  CHECK(out->status == (POLYSPEC_STATUS_BAD_INDEX | POLYSPEC_STATUS_DRAFT_ROW));
  p.num_draft_rows = -1;
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_verify(&p, NULL));
}

static void test_verify(void) {
  struct outputs draft = poisoned(), out = poisoned();
  float target[3 * V], rows[2 * V];
  for (int i = 0; i < 3 * V; ++i) target[i] = kLogits[i % V];
  for (int i = 0; i < 2 * V; ++i) rows[i] = kLogits[i % V];
  polyspec_sample_params s = sample_of(rows, &draft);
  s.batch = 2; /* two rows of one draft, drawn as a batch; one status each */
  int32_t statuses[2];
  s.status = statuses;
  s.logits_stride = V;
  CHECK_CODE(POLYSPEC_OK, polyspec_sample(&s, NULL));

  polyspec_verify_params p = polyspec_verify_params_default();
  p.batch = 1;
  p.draft_len = 2;
  p.vocab = p.draft_vocab = V;
  p.target_logits = target;
  p.target_stride[0] = 3 * V;
  p.target_stride[1] = V;
  p.draft_logits = rows;
  p.draft_stride[0] = 2 * V;
  p.draft_stride[1] = V;
  p.draft_statistics = draft.statistics;
  p.draft_tokens = draft.tokens;
  p.draft_tokens_stride = 2;
  p.tokens = out.tokens;
  p.num_accepted = &out.accepted;
  p.logprobs = out.logprobs;
  p.status = &out.status;
  p.statistics = out.statistics;
  for (int32_t rule = POLYSPEC_RULE_TOKEN; rule <= POLYSPEC_RULE_BLOCK; ++rule) {
    p.rule = rule; /* equal distributions: all accepted, under either rule */
    CHECK_CODE(POLYSPEC_OK, polyspec_verify(&p, NULL));
    CHECK(out.status == 0 && out.accepted == 2);
    CHECK(out.tokens[0] == draft.tokens[0] && out.tokens[1] == draft.tokens[1]);
    CHECK(out.tokens[2] >= 0 && out.tokens[2] < V &&
          out.statistics[2].mass == out.statistics[0].mass);
    /* As many rows as draft tokens: no token follows them. */
    const int64_t two = 2, bare[2] = {0, 2};
    p.offsets = bare;
    p.num_rows = 2;
    p.draft_lengths = &two;
    CHECK_CODE(POLYSPEC_OK, polyspec_verify(&p, NULL));
    CHECK(out.status == 0 && out.accepted == 2 && out.tokens[1] == draft.tokens[1]);
    CHECK(out.tokens[2] == -1 && out.statistics[2].mass == 0);
    p.offsets = NULL;
    p.draft_lengths = NULL;
  }
  p.rule = 5;
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_verify(&p, NULL));
  p.rule = POLYSPEC_RULE_TOKEN;

  /* `draft_statistics` of other distributions are checked: a draft token without probability is
   * reported. */
  draft.statistics[0].threshold = 5.0f;
  CHECK_CODE(POLYSPEC_OK, polyspec_verify(&p, NULL));
  CHECK(out.status & POLYSPEC_STATUS_DRAFT_STATISTICS_MISMATCH);

  /* Greedy against a draft that is wrong from its second token on. */
  const int64_t tokens[2] = {1, 3};
  polyspec_sampling greedy = polyspec_sampling_default();
  greedy.temperature.value = 0;
  p.sampling = &greedy;
  p.draft_tokens = tokens;
  p.draft_logits = NULL;
  p.draft_statistics = NULL;
  memcpy(target + V, kUp, sizeof kUp);
  CHECK_CODE(POLYSPEC_OK, polyspec_verify(&p, NULL));
  CHECK(out.accepted == 1 && out.tokens[0] == 1 && out.tokens[1] == 2 && out.tokens[2] == -1);

  /* The same with an end: after one token for want of room, or because it is an EOS. */
  const int64_t one = 1, eos[2] = {-1, 1};
  int64_t emitted = -9, ended = -9, cached = -9, next = -9, where = -9;
  p.room = &one;
  p.num_emitted = &emitted;
  p.ended = &ended;
  p.cache_lengths = &cached;
  p.next_ids = &next;
  p.next_positions = &where;
  CHECK_CODE(POLYSPEC_OK, polyspec_verify(&p, NULL));
  CHECK(emitted == 1 && ended == POLYSPEC_ENDED_ROOM && out.tokens[0] == 1 && out.tokens[1] == -1);
  CHECK(cached == 1 && next == 1 && where == 0 && out.accepted == 1);
  p.room = NULL;
  p.eos = eos;
  p.eos_count = 2;
  CHECK_CODE(POLYSPEC_OK, polyspec_verify(&p, NULL));
  CHECK(emitted == 1 && ended == POLYSPEC_ENDED_EOS && out.tokens[0] == 1 && out.tokens[1] == -1);
  /* The draft rows of a pool, the second token without one; the target's rows by offsets; the
   * parameters of slot 1. */
  const int64_t pool_rows[3] = {1, -1, 99}, offsets[2] = {0, 3}, slot = 1;
  const float temperatures[2] = {-1.0f, 0.0f};
  polyspec_sampling by_slot = polyspec_sampling_default();
  by_slot.temperature.data = temperatures;
  p.sampling = &by_slot;
  p.slots = &slot;
  p.num_slots = 2;
  p.draft_logits = rows;
  p.draft_rows = pool_rows;
  p.draft_rows_stride = 2;
  p.num_draft_rows = 2;
  p.offsets = offsets;
  p.num_rows = 3;
  p.target_stride[0] = 1 << 30;
  CHECK_CODE(POLYSPEC_OK, polyspec_verify(&p, NULL));
  CHECK(emitted == 1 && ended == POLYSPEC_ENDED_EOS && out.tokens[0] == 1 && out.tokens[1] == -1);
  test_pool_at_one(&p, &by_slot, &out);
  p.sampling = &greedy;
  p.draft_logits = NULL;
  p.target_stride[0] = 3 * V;
  const int32_t masks[3] = {1 << 2, 1 << 2, 1 << 2};
  p.allowed = masks;
  p.allowed_stride[0] = 3;
  p.allowed_stride[1] = 1;
  p.offsets = NULL;
  p.draft_rows = NULL;
  CHECK_CODE(POLYSPEC_OK, polyspec_verify(&p, NULL));
  CHECK(out.status == 0 && out.accepted == 0 && out.tokens[0] == 2 && out.tokens[1] == -1);
  p.offsets = offsets;
  p.draft_rows = pool_rows;
  /* A caller of the release before has none of these fields either: they must not be read. */
  p.struct_size = POLYSPEC_VERIFY_PARAMS_RECTANGULAR_SIZE;
  CHECK_CODE(POLYSPEC_OK, polyspec_verify(&p, NULL));
  CHECK(out.status == 0 && emitted == 1 && out.tokens[0] == 1 && out.tokens[1] == -1);
  p.struct_size = POLYSPEC_VERIFY_PARAMS_UNCUT_SIZE;
  CHECK_CODE(POLYSPEC_OK, polyspec_verify(&p, NULL));
  CHECK(out.accepted == 1 && out.tokens[0] == 1 && out.tokens[1] == 2 && out.tokens[2] == -1);
  p.struct_size = sizeof p;
  p.eos = NULL;
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_verify(&p, NULL));
  p.eos_count = 0;

  p.draft_len = -1;
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_verify(&p, NULL));
}

/* Two children of the root, of which the second is the argmax, and one child of that. */
static void test_verify_tree(void) {
  struct outputs out = poisoned();
  float target[4 * V];
  for (int i = 0; i < 4 * V; ++i) target[i] = kLogits[i % V]; /* argmax 1 everywhere */
  const int64_t tokens[3] = {3, 1, 1}, parents[3] = {-1, -1, 1};
  int64_t path[3], rows[4], emitted[4];
  float logprobs[4];
  polyspec_sampling greedy = polyspec_sampling_default();
  greedy.temperature.value = 0;
  polyspec_verify_tree_params p = polyspec_verify_tree_params_default();
  p.batch = 1;
  p.nodes = p.depth = 3;
  p.vocab = V;
  p.target_logits = target;
  p.target_stride[0] = 4 * V;
  p.target_stride[1] = V;
  p.draft_tokens = tokens;
  p.parents = parents;
  p.sampling = &greedy;
  p.tokens = emitted;
  p.num_accepted = &out.accepted;
  p.path = path;
  p.rows = rows;
  p.logprobs = logprobs;
  p.status = &out.status;
  CHECK_CODE(POLYSPEC_OK, polyspec_verify_tree(&p, NULL));
  CHECK(out.status == 0 && out.accepted == 2);
  CHECK(path[0] == 1 && path[1] == 2 && path[2] == -1);
  CHECK(rows[0] == 0 && rows[1] == 2 && rows[2] == 3 && rows[3] == -1);
  CHECK(emitted[0] == 1 && emitted[1] == 1 && emitted[2] == 1 && emitted[3] == -1);
  const int64_t room = 1;
  int64_t ended = -9;
  p.room = &room;
  p.ended = &ended;
  CHECK_CODE(POLYSPEC_OK, polyspec_verify_tree(&p, NULL));
  CHECK(ended == POLYSPEC_ENDED_ROOM && out.accepted == 1 && path[1] == -1 && emitted[1] == -1);
  p.room = NULL;
  const int64_t circle[3] = {-1, 2, 1};
  p.parents = circle;
  CHECK_CODE(POLYSPEC_OK, polyspec_verify_tree(&p, NULL));
  CHECK(out.status == POLYSPEC_STATUS_BAD_TREE && out.accepted == 0 && emitted[0] == -1);
  p.parents = parents;
  const int32_t masks[4] = {1 << 3, 1, 1, 1};
  p.allowed = masks;
  p.allowed_stride[0] = 4;
  p.allowed_stride[1] = 1;
  CHECK_CODE(POLYSPEC_OK, polyspec_verify_tree(&p, NULL));
  CHECK(out.status == 0 && out.accepted == 1 && emitted[0] == 3 && emitted[1] == 0);
  p.struct_size = POLYSPEC_VERIFY_TREE_PARAMS_MASKLESS_SIZE;
  CHECK_CODE(POLYSPEC_OK, polyspec_verify_tree(&p, NULL));
  CHECK(out.status == 0 && out.accepted == 2);
  p.allowed = NULL;
  p.struct_size = sizeof p;
  p.rule = POLYSPEC_RULE_BLOCK; /* of deterministic children the same */
  CHECK_CODE(POLYSPEC_OK, polyspec_verify_tree(&p, NULL));
  CHECK(out.status == 0 && out.accepted == 2);
  p.rule = 5;
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_verify_tree(&p, NULL));
  p.struct_size = POLYSPEC_VERIFY_TREE_PARAMS_RULELESS_SIZE;
  CHECK_CODE(POLYSPEC_OK, polyspec_verify_tree(&p, NULL));
  p.rule = POLYSPEC_RULE_TOKEN;
  p.struct_size = POLYSPEC_VERIFY_TREE_PARAMS_RECTANGULAR_SIZE;
  CHECK_CODE(POLYSPEC_OK, polyspec_verify_tree(&p, NULL));
  CHECK(out.status == 0 && out.accepted == 2);
  p.struct_size = sizeof p;
  const int64_t offsets[2] = {0, 4};
  p.offsets = offsets;
  p.num_rows = 4;
  const int64_t slots[1] = {1}, rooms[2] = {-1, 9};
  p.slots = slots;
  p.num_slots = 2;
  p.room = rooms;
  p.target_stride[0] = -77;
  CHECK_CODE(POLYSPEC_OK, polyspec_verify_tree(&p, NULL));
  CHECK(out.status == 0 && out.accepted == 2 && path[0] == 1 && path[1] == 2);
  p.num_rows = 3;
  CHECK_CODE(POLYSPEC_OK, polyspec_verify_tree(&p, NULL));
  CHECK(out.status == POLYSPEC_STATUS_BAD_INDEX && emitted[0] == -1);
  p.num_rows = -1;
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_verify_tree(&p, NULL));
  p.offsets = NULL;
  p.num_slots = -1;
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_verify_tree(&p, NULL));
  p.slots = NULL;
  p.room = NULL;
  p.depth = 4;
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_verify_tree(&p, NULL));
  p.depth = 3;
  p.nodes = 1 << 14;
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_verify_tree(&p, NULL));
  p.nodes = 3;
  static char workspace[32] __attribute__((aligned(16)));
  p.workspace = workspace + 8;
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_verify_tree(&p, NULL));
  p.struct_size = POLYSPEC_VERIFY_TREE_PARAMS_WALKED_SIZE;
  CHECK_CODE(POLYSPEC_OK, polyspec_verify_tree(&p, NULL));
  p.path = NULL;
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_verify_tree(&p, NULL));
  p.struct_size -= 8;
  CHECK_CODE(POLYSPEC_BAD_STRUCT_SIZE, polyspec_verify_tree(&p, NULL));
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_verify_tree(NULL, NULL));
}

/* Missing strides are the strides of contiguous rows. */
static void test_default_strides(void) {
  enum { B = 2, K = 2 };
  float target[B * (K + 1) * V], draft[B * K * V];
  int32_t allowed[B * (K + 1)];
  const int64_t tokens[B * K] = {1, 2, 3, 0}, parents[B * K] = {-1, 0, -1, 0};
  int64_t pool_rows[B * (K + 1)] = {0, 1, -1, 2, 3, -1};
  for (int i = 0; i < B * (K + 1) * V; ++i) target[i] = (float)(i * 7 % 11) / 4;
  for (int i = 0; i < B * K * V; ++i) draft[i] = (float)(i * 5 % 13) / 4;
  for (int i = 0; i < B * (K + 1); ++i) allowed[i] = 15 - (1 << i % 3);
  allowed[0] = allowed[1] = allowed[3] = allowed[4] = 15;
  polyspec_sampling sampling = polyspec_sampling_default();
  struct {
    int64_t tokens[B * (K + 1)], accepted[B], path[B * K], rows[B * (K + 1)];
    float logprobs[B * (K + 1)];
    int32_t status[B];
  } out[2];
  polyspec_sample_params s = polyspec_sample_params_default();
  s.batch = B * (K + 1);
  s.vocab = V;
  s.sampling = &sampling;
  s.logits = target;
  s.allowed = allowed;
  int32_t status[B * (K + 1)];
  s.status = status;
  polyspec_verify_params v = polyspec_verify_params_default();
  v.batch = B;
  v.draft_len = K;
  v.vocab = v.draft_vocab = V;
  v.sampling = &sampling;
  v.target_logits = target;
  v.draft_logits = draft;
  v.draft_tokens = tokens;
  v.allowed = allowed;
  polyspec_verify_tree_params t = polyspec_verify_tree_params_default();
  t.batch = B;
  t.nodes = t.depth = K;
  t.vocab = t.draft_vocab = V;
  t.sampling = &sampling;
  t.target_logits = target;
  t.draft_logits = draft;
  t.draft_rows = pool_rows;
  t.num_draft_rows = B * K;
  t.draft_tokens = tokens;
  t.parents = parents;
  t.allowed = allowed;
  for (int call = 0; call < 3; ++call) {
    memset(out, 0x5a, sizeof out);
    for (int given = 0; given < 2; ++given) {
      s.logits_stride = given ? V : 0;
      s.allowed_stride = given;
      v.target_stride[0] = t.target_stride[0] = given ? (K + 1) * V : 0;
      v.target_stride[1] = t.target_stride[1] = given ? V : 0;
      v.allowed_stride[0] = t.allowed_stride[0] = given ? K + 1 : 0;
      v.allowed_stride[1] = t.allowed_stride[1] = given;
      v.draft_stride[0] = given ? K * V : 0;
      v.draft_stride[1] = t.draft_stride = given ? V : 0;
      v.draft_tokens_stride = given ? K : 0;
      s.tokens = v.tokens = t.tokens = out[given].tokens;
      s.logprobs = v.logprobs = t.logprobs = out[given].logprobs;
      v.num_accepted = t.num_accepted = out[given].accepted;
      v.status = t.status = out[given].status;
      t.path = out[given].path;
      t.rows = out[given].rows;
      CHECK_CODE(POLYSPEC_OK, call == 0   ? polyspec_sample(&s, NULL)
                              : call == 1 ? polyspec_verify(&v, NULL)
                                          : polyspec_verify_tree(&t, NULL));
    }
    CHECK(memcmp(&out[0], &out[1], sizeof out[0]) == 0);
    CHECK(out[0].tokens[0] >= 0 && out[0].tokens[0] < V);
  }
}

static void test_scheduler(void) {
  polyspec_scheduler* s = NULL;
  const int64_t windows[2] = {4, 2};
  const int64_t negative[2] = {4, -1};
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_scheduler_create(windows, 2, NULL));
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_scheduler_create(NULL, 2, &s));
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_scheduler_create(windows, 0, &s));
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_scheduler_create(negative, 2, &s));
  CHECK(s == NULL && strstr(polyspec_last_error(), "-1") != NULL);
  CHECK_CODE(POLYSPEC_OK, polyspec_scheduler_create(windows, 2, &s));
  CHECK(s != NULL && polyspec_scheduler_levels(s) == 3);
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_scheduler_start(s, -1));
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_scheduler_start(NULL, 1));
  CHECK_CODE(POLYSPEC_OK, polyspec_scheduler_start(s, 20));

  polyspec_step step = polyspec_step_default();
  step.struct_size = 3;
  CHECK_CODE(POLYSPEC_BAD_STRUCT_SIZE, polyspec_scheduler_next(s, &step));
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_scheduler_next(s, NULL));
  step = polyspec_step_default();
  CHECK_CODE(POLYSPEC_OK, polyspec_scheduler_next(s, &step));
  CHECK(step.kind == POLYSPEC_STEP_DRAFT && step.level == 3 && step.count == 2);
  CHECK_CODE(POLYSPEC_WRONG_STATE, polyspec_scheduler_report(s, 1, 1, 0));
  CHECK_CODE(POLYSPEC_WRONG_STATE, polyspec_scheduler_report(s, 3, 3, 0));
  CHECK_CODE(POLYSPEC_OK, polyspec_scheduler_report(s, 3, 2, 0));
  CHECK(polyspec_scheduler_pending(s, 2) == 2 && polyspec_scheduler_pending(s, 1) == 0);
  CHECK(polyspec_scheduler_pending(s, 3) == -1 && polyspec_scheduler_pending(s, 0) == -1);
  CHECK_CODE(POLYSPEC_OK, polyspec_scheduler_next(s, &step));
  CHECK(step.kind == POLYSPEC_STEP_VERIFY && step.level == 2 && step.count == 2);
  CHECK_CODE(POLYSPEC_OK, polyspec_scheduler_report(s, 2, 3, 0));
  CHECK(polyspec_scheduler_pending(s, 1) == 3);

  /* With smaller windows the three tokens are enough for level 1. */
  const int64_t smaller[2] = {3, 1};
  int64_t held[2] = {0, 0};
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_scheduler_set_windows(s, smaller, 1));
  CHECK_CODE(POLYSPEC_OK, polyspec_scheduler_set_windows(s, smaller, 2));
  CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, polyspec_scheduler_get_windows(s, held, 3));
  CHECK_CODE(POLYSPEC_OK, polyspec_scheduler_get_windows(s, held, 2));
  CHECK(held[0] == 3 && held[1] == 1);
  CHECK_CODE(POLYSPEC_OK, polyspec_scheduler_next(s, &step));
  CHECK(step.kind == POLYSPEC_STEP_VERIFY && step.level == 1 && step.count == 3);
  CHECK(polyspec_scheduler_pending(s, 3) == -1); /* the drafter has none */
  CHECK(strstr(polyspec_last_error(), "level must be in [1, 2], got 3") != NULL);
  CHECK(polyspec_scheduler_done(s) == 0);
  CHECK_CODE(POLYSPEC_OK, polyspec_scheduler_report(s, 1, 2, 1)); /* the second token was an EOS */
  CHECK(polyspec_scheduler_done(s) == 1 && polyspec_scheduler_committed(s) == 2);
  CHECK_CODE(POLYSPEC_OK, polyspec_scheduler_next(s, &step));
  CHECK(step.kind == POLYSPEC_STEP_DONE);
  CHECK_CODE(POLYSPEC_WRONG_STATE, polyspec_scheduler_report(s, 1, 1, 0));
  polyspec_scheduler_destroy(s);
  polyspec_scheduler_destroy(NULL);
  CHECK(polyspec_scheduler_done(NULL) == -1 && polyspec_scheduler_levels(NULL) == -1);
  CHECK(strstr(polyspec_last_error(),
               "polyspec_scheduler_levels: scheduler: expected a pointer, given NULL") != NULL);
  CHECK(polyspec_scheduler_committed(NULL) == -1 && polyspec_scheduler_pending(NULL, 1) == -1);
  CHECK(strstr(polyspec_last_error(),
               "polyspec_scheduler_pending: scheduler: expected a pointer, given NULL") != NULL);
}

/* Backwards, so that a reliance on the order shows. */
static void run_backwards(void* pool, int64_t n, polyspec_body body, void* context) {
  *(int64_t*)pool += n;
  for (int64_t i = n - 1; i >= 0; --i) body(context, i);
}

static void test_executor(void) {
  enum { B = 5 };
  float logits[B * V];
  for (int i = 0; i < B * V; ++i) logits[i] = (float)(i % 7) * 0.25f;
  int64_t serial[B], tokens[B], calls = 0;
  float logprobs[B];
  int32_t status[B];
  polyspec_sample_params p = polyspec_sample_params_default();
  p.batch = B;
  p.vocab = V;
  p.logits = logits;
  p.logits_stride = V;
  p.tokens = serial;
  p.logprobs = logprobs;
  p.status = status;
  CHECK_CODE(POLYSPEC_OK, polyspec_sample(&p, NULL));
  polyspec_stream stream = polyspec_stream_default();
  stream.executor.run = run_backwards;
  stream.executor.pool = &calls;
  p.tokens = tokens;
  CHECK_CODE(POLYSPEC_OK, polyspec_sample(&p, &stream));
  CHECK(calls > 0 && memcmp(serial, tokens, sizeof tokens) == 0);
}

int main(void) {
  test_texts();
  test_struct_sizes();
  test_sample();
  test_verify();
  test_verify_tree();
  test_default_strides();
  test_scheduler();
  test_executor();
  printf("c_api_test: all passed, polyspec %s\n", polyspec_version());
  return 0;
}

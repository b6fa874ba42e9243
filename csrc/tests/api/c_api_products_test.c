/* Packed weights and attention through the C interface: shapes, labels, products, refusals. */
#include "support/c_check.h"

/* Two outputs of 32 inputs: output 0 has q = k % 16 times 1/2, output 1 has q = 8 and zero 1/4. */
static void test_int4(void) {
  static uint8_t values[64], values_back[64];
  float scales[2] = {0.5f, 1.0f}, zeros[2] = {0.0f, 0.25f}, scales_back[2], zeros_back[2];
  static uint8_t packed[1024] __attribute__((aligned(64)));
  static uint8_t workspace[4096] __attribute__((aligned(64)));
  float x[32], y[2], expected[2] = {0, 0};
  int k;
  for (k = 0; k < 32; ++k) {
    values[k] = (uint8_t)(k % 16);
    values[32 + k] = 8;
    x[k] = k == 31 ? 127.0f : (float)(k - 10); /* whole numbers up to 127 are not rounded */
    expected[0] += x[k] * 0.5f * (float)(k % 16 - 8);
    expected[1] += x[k] * 0.25f;
  }
  polyspec_int4_shape shape = polyspec_int4_shape_default();
  CHECK(shape.group == 128 && shape.scale_dtype == POLYSPEC_BFLOAT16);
  shape.outputs = 2;
  shape.inputs = 32;
  CHECK(polyspec_int4_packed_bytes(&shape) == -1);
  CHECK(strstr(polyspec_last_error(),
               "polyspec_int4_packed_bytes: inputs: expected a multiple of group, 128, given 32"));
  CHECK(polyspec_int4_workspace_bytes(&shape, 1) == -1);
  shape.group = 32;
  const int64_t bytes = 16 * (2 + 2 + 16) + 64; /* and the label */
  CHECK(polyspec_int4_packed_bytes(&shape) == bytes);

  polyspec_int4_pack_params pack = polyspec_int4_pack_params_default();
  CHECK_REFUSED("a struct: expected a pointer, given NULL", polyspec_int4_pack(&pack));
  pack.shape = &shape;
  pack.values = values;
  pack.scales = scales;
  CHECK_REFUSED("zeros: expected a pointer, given null", polyspec_int4_pack(&pack));
  pack.zeros = zeros;
  pack.packed = packed + 3;
  CHECK_REFUSED("packed: expected a multiple of 64 bytes, given an address 3 behind one",
                polyspec_int4_pack(&pack));
  pack.packed = packed;
  CHECK_CODE(POLYSPEC_OK, polyspec_int4_pack(&pack));
  CHECK_CODE(POLYSPEC_OK, polyspec_int4_packed_check(&shape, packed, bytes));
  CHECK_CODE(POLYSPEC_OK, polyspec_int4_pack_on(&pack, NULL));
  CHECK_CODE(POLYSPEC_OK, polyspec_int4_packed_check(&shape, packed, bytes));
  CHECK(polyspec_int4_packed_bytes_on(&shape, POLYSPEC_CPU) == bytes);
  /* Two tiles of 32 outputs, in which a group is 8 vectors of scales and 32 of numbers. */
  CHECK(polyspec_int4_packed_bytes_on(&shape, POLYSPEC_CUDA) == 2 * (8 + 32) * 16);
  CHECK(polyspec_int4_packed_bytes_on(&shape, 2) == -1);
  CHECK(strstr(polyspec_last_error(), "device: expected POLYSPEC_CPU (0) or POLYSPEC_CUDA (1)"));

  polyspec_int4_product_params p = polyspec_int4_product_params_default();
  p.shape = &shape;
  p.tokens = 1;
  CHECK(polyspec_int4_workspace_bytes(&shape, 1) <= (int64_t)sizeof workspace);
  p.x = x;
  p.packed = packed;
  p.y = y;
  CHECK_REFUSED("workspace: expected a pointer, given null", polyspec_int4_product(&p, NULL));
  p.workspace = workspace;
  CHECK_CODE(POLYSPEC_OK, polyspec_int4_product(&p, NULL));
  CHECK(y[0] == expected[0] && y[1] == expected[1]);

  polyspec_int4_unpack_params unpack = polyspec_int4_unpack_params_default();
  unpack.shape = &shape;
  unpack.packed = packed;
  unpack.values = values_back;
  unpack.scales = scales_back;
  unpack.zeros = zeros_back;
  CHECK_CODE(POLYSPEC_OK, polyspec_int4_unpack(&unpack));
  CHECK(memcmp(values, values_back, sizeof values) == 0);
  CHECK(scales_back[0] == 0.5f && zeros_back[1] == 0.25f);

  /* Another shape of as many bytes is refused by the label, and so is memory without one. */
  polyspec_int4_shape other = shape;
  other.outputs = 3;
  CHECK(polyspec_int4_packed_bytes(&other) == bytes);
  CHECK_REFUSED(
      "expected layout 5, dtype 1, group 32, [3, 32], given layout 5, dtype 1, group 32, "
      "[2, 32]",
      polyspec_int4_packed_check(&other, packed, bytes));
  CHECK_REFUSED("packed: expected 384 bytes, given 320",
                polyspec_int4_packed_check(&shape, packed, 320));
  unpack.shape = &other;
  CHECK_REFUSED("packed: expected layout 5", polyspec_int4_unpack(&unpack));
  float three[3] = {7, 7, 7};
  p.shape = &other;
  p.y = three;
  CHECK_REFUSED("packed: expected layout 5", polyspec_int4_product(&p, NULL));
  packed[0] ^= 1;
  CHECK_REFUSED("given memory without a label", polyspec_int4_packed_check(&shape, packed, bytes));
  CHECK(three[0] == 7);

  values[35] = 16;
  CHECK_REFUSED("values: expected numbers in [0, 16), given 16", polyspec_int4_pack(&pack));
}

/* Sixteen even steps are met exactly. */
static void test_int4_round(void) {
  float weights[32], scales[1], zeros[1];
  uint8_t values[32];
  int k;
  polyspec_int4_shape shape = polyspec_int4_shape_default();
  polyspec_int4_round_params p = polyspec_int4_round_params_default();
  for (k = 0; k < 32; ++k) weights[k] = (float)(k % 16);
  shape.outputs = 1;
  shape.inputs = shape.group = 32;
  p.shape = &shape;
  p.weights = weights;
  p.values = values;
  p.scales = scales;
  p.zeros = zeros;
  CHECK_CODE(POLYSPEC_OK, polyspec_int4_round(&p, NULL));
  for (k = 0; k < 32; ++k) CHECK((float)(values[k] - 8) * scales[0] + zeros[0] == weights[k]);
  weights[5] = 1.0f / 0.0f;
  CHECK_REFUSED("weights: expected finite numbers", polyspec_int4_round(&p, NULL));
}

/* Two outputs of three inputs; numbers that bfloat16 holds, by their upper halves. */
static void test_dense(void) {
  static const uint16_t one = 0x3f80, two = 0x4000, half = 0x3f00, minus_one = 0xbf80;
  const uint16_t weights[8] = {one, two, half, 0x7fc0, minus_one, one, one, 0x7fc0};
  const uint16_t x[3] = {two, one, two}, bias[2] = {minus_one, one};
  uint16_t y[2];
  static uint8_t packed[192] __attribute__((aligned(64)));
  static uint8_t workspace[64] __attribute__((aligned(64)));
  polyspec_dense_shape shape = polyspec_dense_shape_default();
  CHECK(polyspec_dense_packed_bytes(&shape) == -1);
  CHECK(strstr(polyspec_last_error(),
               "polyspec_dense_packed_bytes: outputs: expected [1, 2^31), given 0"));
  shape.outputs = shape.inputs = 2147483647; /* 2^64 bytes */
  CHECK(polyspec_dense_packed_bytes(&shape) == -1);
  CHECK(strstr(polyspec_last_error(), "below 2^63 bytes, given [2147483647, 2147483647]"));
  shape.inputs = 1;
  CHECK(polyspec_dense_workspace_bytes(&shape, -1) == -1);
  CHECK(strstr(polyspec_last_error(), "dense_workspace_bytes: tokens: expected >= 0, given -1"));
  shape.outputs = 2;
  shape.inputs = 3;
  CHECK(polyspec_dense_packed_bytes(&shape) == 192 + 64); /* float32 */
  shape.dtype = POLYSPEC_FLOAT16;
  CHECK(polyspec_dense_packed_bytes(&shape) == -1);
  CHECK(strstr(polyspec_last_error(), "dtype: expected float32 (0) or bfloat16 (1), given 2"));
  shape.dtype = POLYSPEC_BFLOAT16;
  CHECK(polyspec_dense_packed_bytes(&shape) == (int64_t)sizeof packed);

  polyspec_dense_pack_params pack = polyspec_dense_pack_params_default();
  pack.shape = &shape;
  pack.packed = packed;
  CHECK_REFUSED("weights: expected a pointer, given null", polyspec_dense_pack(&pack));
  pack.weights = weights;
  pack.weights_stride = 4;
  CHECK_CODE(POLYSPEC_OK, polyspec_dense_pack(&pack));
  CHECK_CODE(POLYSPEC_OK, polyspec_dense_packed_check(&shape, packed, sizeof packed));

  polyspec_dense_product_params p = polyspec_dense_product_params_default();
  p.shape = &shape;
  p.tokens = 1;
  CHECK(polyspec_dense_workspace_bytes(&shape, 1) <= (int64_t)sizeof workspace);
  p.x = x;
  p.packed = packed;
  p.y = y;
  p.workspace = workspace;
  CHECK_CODE(POLYSPEC_OK, polyspec_dense_product(&p, NULL));
  CHECK(y[0] == 0x40a0 && y[1] == one); /* 5 and 1 */
  p.bias = bias;
  CHECK_CODE(POLYSPEC_OK, polyspec_dense_product(&p, NULL));
  CHECK(y[0] == 0x4080 && y[1] == two);
  p.x_stride = 2;
  p.tokens = 2;
  CHECK_REFUSED("x_stride: expected at least inputs", polyspec_dense_product(&p, NULL));
  p.tokens = 1;

  polyspec_dense_shape other = shape; /* 4 inputs fill the same blocks */
  other.inputs = 4;
  p.shape = &other;
  CHECK_REFUSED("expected layout 4, dtype 1, group 0, [2, 4], given",
                polyspec_dense_product(&p, NULL));
  p.shape = &shape;
  p.workspace = NULL;
  CHECK_REFUSED("workspace: expected a pointer, given null", polyspec_dense_product(&p, NULL));
  shape.struct_size -= 1;
  CHECK_CODE(POLYSPEC_BAD_STRUCT_SIZE, polyspec_dense_product(&p, NULL));
}

/* Two heads share one of keys; a query that is equally near to all keys gives their mean value. */
static void test_attention(void) {
  enum { D = 32, T = 2, N = 3 };
  static float query[2 * T * D], key[N * D], value[N * D], out[T * 2 * D];
  int n, d;
  for (n = 0; n < N; ++n)
    for (d = 0; d < D; ++d) value[n * D + d] = (float)(n * 10 + d);
  polyspec_attention_params p = polyspec_attention_params_default();
  CHECK(p.scale == 1.0f);
  p.batch = p.groups = 1;
  p.heads = 2;
  p.tokens = T;
  p.length = N;
  p.width = p.value_width = D;
  p.causal = 1;
  p.query = query;
  p.key = key;
  p.value = value;
  CHECK_REFUSED("out: expected a pointer, given null", polyspec_attention(&p, NULL));
  p.out = out;
  static float workspace[T * 2 * (D + 17)] __attribute__((aligned(64)));
  CHECK(polyspec_attention_workspace_bytes(&p) == (int64_t)sizeof workspace);
  p.workspace = workspace + 1;
  CHECK_REFUSED("workspace: expected a multiple of 64 bytes, given an address 4 behind one",
                polyspec_attention(&p, NULL));
  p.workspace = workspace;
  CHECK_CODE(POLYSPEC_OK, polyspec_attention(&p, NULL));
  for (d = 0; d < D; ++d) {
    CHECK(out[d] == (float)(5 + d) && out[D + d] == (float)(5 + d)); /* keys 0 and 1, both heads */
    CHECK(out[2 * D + d] > (float)d + 9.99f && out[2 * D + d] < (float)d + 10.01f); /* all three */
  }
  static const int64_t lengths[1] = {1}; /* as causal: token 0 sees two keys, token 1 three */
  p.lengths = lengths;
  p.causal = 0;
  static float by_lengths[T * 2 * D];
  p.out = by_lengths;
  CHECK_CODE(POLYSPEC_OK, polyspec_attention(&p, NULL));
  CHECK(memcmp(out, by_lengths, sizeof out) == 0);
  p.value_width = 40;
  CHECK_REFUSED("value_width: expected a multiple of 32 in [32, 256], given 40",
                polyspec_attention(&p, NULL));
  CHECK(polyspec_attention_workspace_bytes(&p) == -1);
  p.value_width = D;
  p.heads = 0;
  CHECK_REFUSED("heads: expected a positive multiple of groups, 1, given 0",
                polyspec_attention(&p, NULL));
}

static void test_support(void) {
  int32_t op;
  for (op = POLYSPEC_OP_SAMPLE; op <= POLYSPEC_OP_SCHEDULE; ++op) {
    CHECK(polyspec_supports(op, POLYSPEC_CPU, POLYSPEC_BFLOAT16) == 1);
    const int32_t half = op != POLYSPEC_OP_DENSE && op != POLYSPEC_OP_ATTENTION;
    CHECK(polyspec_supports(op, POLYSPEC_CPU, POLYSPEC_FLOAT16) == half);
    const int32_t gpu = op != POLYSPEC_OP_DENSE && op != POLYSPEC_OP_INT4;
    CHECK(polyspec_supports(op, POLYSPEC_CUDA, POLYSPEC_FLOAT32) == (gpu && polyspec_has_cuda()));
    CHECK(polyspec_supports(op, 7, POLYSPEC_FLOAT32) == 0);
    CHECK(op == POLYSPEC_OP_SCHEDULE || polyspec_supports(op, POLYSPEC_CPU, 3) == 0);
    CHECK(polyspec_isa(op) != NULL && strlen(polyspec_isa(op)) >= 3);
  }
  CHECK(polyspec_supports(8, POLYSPEC_CPU, POLYSPEC_FLOAT32) == 0 && polyspec_isa(8) == NULL);
  CHECK(polyspec_supports(-1, POLYSPEC_CPU, POLYSPEC_FLOAT32) == 0 && polyspec_isa(-1) == NULL);
}

int main(void) {
  test_int4();
  test_int4_round();
  test_dense();
  test_attention();
  test_support();
  return 0;
}

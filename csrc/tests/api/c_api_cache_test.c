/* Caches of keys and values through the C interface: append, ring, pages, and an accepted path. One
 * byte an element, one head, vectors of one element: a cache reads as a text. Strides are the
 * defaults. */
#include "support/c_check.h"

static polyspec_new_tokens tokens_of(const char* text, const int64_t* lengths, int64_t* after,
                                     int32_t* status) {
  polyspec_new_tokens in = polyspec_new_tokens_default();
  in.batch = in.heads = in.key_dim = in.value_dim = 1;
  in.tokens = (int64_t)strlen(text);
  in.element_size = 1;
  in.keys.data = in.values.data = text;
  in.lengths = lengths;
  in.new_lengths = after;
  in.status = status;
  return in;
}

static void test_append(void) {
  char keys[] = "------", values[] = "------";
  int64_t lengths[1] = {2}, after[1] = {-5}, counts[1] = {3};
  int32_t status[1] = {-5};
  polyspec_new_tokens in = tokens_of("abc", lengths, after, status);
  polyspec_append_params p = polyspec_append_params_default();
  CHECK_REFUSED("a struct: expected a pointer, given NULL", polyspec_append(&p, NULL));
  p.in = &in;
  p.capacity = 6;
  p.keys.data = keys;
  CHECK_REFUSED("cached values: expected a pointer, given null", polyspec_append(&p, NULL));
  p.values.data = values;
  CHECK_CODE(POLYSPEC_OK, polyspec_append(&p, NULL));
  CHECK(strcmp(keys, "--abc-") == 0 && strcmp(values, keys) == 0);
  CHECK(after[0] == 5 && status[0] == 0);

  /* Rolling back is a smaller length; tokens that do not fit are not written. */
  lengths[0] = 3;
  in.keys.data = in.values.data = "xy";
  in.tokens = 2;
  CHECK_CODE(POLYSPEC_OK, polyspec_append(&p, NULL));
  CHECK(strcmp(keys, "--axy-") == 0 && after[0] == 5);
  lengths[0] = 5;
  CHECK_CODE(POLYSPEC_OK, polyspec_append(&p, NULL));
  CHECK(strcmp(keys, "--axy-") == 0 && after[0] == 5);
  CHECK(status[0] == POLYSPEC_STATUS_CACHE_FULL);
  in.counts = counts; /* more than there are */
  lengths[0] = 0;
  CHECK_CODE(POLYSPEC_OK, polyspec_append(&p, NULL));
  CHECK(status[0] == POLYSPEC_STATUS_BAD_LENGTH);
  counts[0] = 1;
  CHECK_CODE(POLYSPEC_OK, polyspec_append(&p, NULL));
  CHECK(strcmp(keys, "x-axy-") == 0 && after[0] == 1);
  in.counts = NULL;

  lengths[0] = 6; /* over the oldest after one sink */
  p.ring = 1;
  p.sinks = 1;
  CHECK_CODE(POLYSPEC_OK, polyspec_append(&p, NULL));
  CHECK(strcmp(keys, "xxyxy-") == 0 && after[0] == 8 && status[0] == 0);

  p.sinks = 6;
  CHECK_REFUSED("sinks: expected [0, capacity) with a ring, 0 without, given 6",
                polyspec_append(&p, NULL));
  p.sinks = 0;
  in.element_size = 3;
  CHECK_REFUSED("polyspec_append: element_size: expected 1, 2 or 4, given 3",
                polyspec_append(&p, NULL));
  in.element_size = 1;
  in.new_lengths = lengths;
  CHECK_REFUSED("new_lengths: expected memory apart", polyspec_append(&p, NULL));
  in.new_lengths = after;
  in.struct_size -= 8;
  CHECK_CODE(POLYSPEC_BAD_STRUCT_SIZE, polyspec_append(&p, NULL));
}

/* Two pages of two tokens each in a pool of three. */
static void test_pages(void) {
  char keys[] = "------", values[] = "------";
  int64_t lengths[1] = {3}, after[1], held[1] = {0}, free_count[1] = {3};
  int32_t status[1] = {-5}, table[2] = {-1, -1}, pool[3] = {0, 1, 2};
  polyspec_pages_params pages = polyspec_pages_params_default();
  pages.batch = 1;
  pages.pages = 3;
  pages.page_size = pages.max_pages = 2;
  pages.lengths = lengths;
  pages.block_table = table;
  pages.held = held;
  pages.free_pages = pool;
  pages.free_count = free_count;
  CHECK_REFUSED("status: expected a pointer, given null", polyspec_reserve_pages(&pages, NULL));
  pages.status = status;
  CHECK_CODE(POLYSPEC_OK, polyspec_reserve_pages(&pages, NULL));
  CHECK(status[0] == 0 && held[0] == 2 && free_count[0] == 1 && table[0] == 2 && table[1] == 1);

  lengths[0] = 1;
  polyspec_new_tokens in = tokens_of("abc", lengths, after, status);
  in.tokens = 2;
  polyspec_paged_append_params p = polyspec_paged_append_params_default();
  p.in = &in;
  p.pages = 3;
  p.page_size = p.max_pages = 2;
  p.block_table = table;
  p.keys.data = keys;
  p.values.data = values;
  CHECK_CODE(POLYSPEC_OK, polyspec_append_paged(&p, NULL));
  CHECK(status[0] == 0 && after[0] == 3 && strcmp(keys, "--b--a") == 0);
  CHECK(strcmp(values, keys) == 0);

  lengths[0] = 2; /* the second page goes back */
  CHECK_CODE(POLYSPEC_OK, polyspec_truncate_pages(&pages, NULL));
  CHECK(held[0] == 1 && free_count[0] == 2 && table[1] == -1 && pool[1] == 1);
  CHECK_CODE(POLYSPEC_OK, polyspec_append_paged(&p, NULL)); /* a position without a page */
  CHECK(status[0] == POLYSPEC_STATUS_BAD_PAGE && after[0] == 2);
  pages.page_size = 0;
  CHECK_REFUSED("polyspec_truncate_pages: page_size: expected >= 1, given 0",
                polyspec_truncate_pages(&pages, NULL));
}

/* Nodes a to d follow one token; a and d are accepted. */
static void test_compact(void) {
  char keys[] = "-abcd", values[] = "-ABCD";
  void* key_bases[1];
  void* value_bases[1];
  int64_t lengths[1] = {1}, path[3] = {0, 3, -1}, after[1];
  int32_t status[1] = {-5};
  key_bases[0] = keys;
  value_bases[0] = values;
  polyspec_compact_tree_params p = polyspec_compact_tree_params_default();
  CHECK(p.alignment == 16);
  p.layers = p.batch = p.heads = p.key_dim = p.value_dim = 1;
  p.element_size = p.alignment = 1;
  p.capacity = 5;
  p.keys = key_bases;
  p.values = value_bases;
  p.path_len = 3;
  p.lengths = lengths;
  p.path = path;
  p.new_lengths = after;
  p.status = status;
  CHECK_CODE(POLYSPEC_OK, polyspec_compact_tree(&p, NULL));
  CHECK(status[0] == 0 && after[0] == 3);
  CHECK(memcmp(keys, "-ad", 3) == 0 && memcmp(values, "-AD", 3) == 0);
  path[1] = 0;
  CHECK_CODE(POLYSPEC_OK, polyspec_compact_tree(&p, NULL));
  CHECK(status[0] == POLYSPEC_STATUS_BAD_PATH && after[0] == 1);
  p.alignment = 3;
  CHECK_REFUSED("alignment: expected a power of two, at least element_size, given 3",
                polyspec_compact_tree(&p, NULL));
}

int main(void) {
  test_append();
  test_pages();
  test_compact();
  return 0;
}

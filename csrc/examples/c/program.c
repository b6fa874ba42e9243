/* Two levels in C99: a draft model proposes K letters, the target verifies all of them at once, and
 * the text has exactly the target's distribution.
 *
 *   cc program.c $(pkg-config --cflags --libs --static polyspec) -o program
 *   ./program 0.8      (the temperature; 0, which is greedy, if it is left out)
 *
 * The models are tables of logits by the letter before. Put yours in `logits_behind`: one row per
 * letter, as far as the target is concerned K + 1 rows in one forward pass.
 *
 * Exit status: 0; 1 where a call fails, or the greedy text differs from plain decoding; 2 for an
 * invalid temperature. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "polyspec/polyspec.h"

enum { VOCAB = 27, K = 4, LENGTH = 60, TARGET = 1, DRAFTER = 2 };

/* Row of a model after `letter`: [VOCAB]. The drafter is a rough copy of the target. */
static void logits_behind(int level, int64_t letter, float* row) {
  for (int64_t next = 0; next < VOCAB; ++next) {
    const int64_t fine = (letter * 7 + next * 11 + letter * next * 3) % 31;
    row[next] = 0.3f * (float)(level == TARGET ? fine : fine - fine % 4);
  }
}

static int failed(polyspec_code code, const int32_t* status) {
  char text[128];
  if (code != POLYSPEC_OK) {
    fprintf(stderr, "%s: %s\n", polyspec_code_string(code), polyspec_last_error());
  } else if (*status != 0) {
    polyspec_status_string(*status, text, sizeof text);
    fprintf(stderr, "%s\n", text);
  }
  return code != POLYSPEC_OK || *status != 0;
}

/* The text after its first letter, with drafts of k letters; k = 0 is plain decoding. Returns the
 * number of verifications, which are the target's forward passes, or 0 where a call fails. */
static int generate(int64_t k, float temperature, int64_t* text) {
  float target[(K + 1) * VOCAB], draft[K * VOCAB], logprobs[K + 1];
  int64_t emitted[K + 1], accepted;
  polyspec_row_statistics statistics[K];
  int32_t status = 0;
  int passes = 0;
  int64_t length = 1;

  polyspec_sampling sampling = polyspec_sampling_default(); /* one object for both levels */
  sampling.temperature.value = temperature;
  polyspec_draw draw = polyspec_draw_default();
  draw.seed.value = 7;

  text[0] = 0;
  while (length < LENGTH) {
    /* Drafted letters follow the text; rejected letters are overwritten. */
    const int64_t count = k < LENGTH - 1 - length ? k : LENGTH - 1 - length;
    draw.level = DRAFTER;
    draw.round.value = passes;
    for (int64_t i = 0; i < count; ++i) {
      logits_behind(DRAFTER, text[length + i - 1], draft + i * VOCAB);
      draw.position.value = length + i;
      polyspec_sample_params p = polyspec_sample_params_default();
      p.batch = 1;
      p.vocab = VOCAB;
      p.logits = draft + i * VOCAB;
      p.sampling = &sampling;
      p.draw = &draw;
      p.tokens = text + length + i;
      p.logprobs = logprobs;
      p.status = &status;
      p.statistics = statistics + i; /* the verification need not reduce the row again */
      if (failed(polyspec_sample(&p, NULL), &status)) return 0;
    }

    for (int64_t i = 0; i <= count; ++i) {
      logits_behind(TARGET, text[length + i - 1], target + i * VOCAB);
    }
    draw.level = TARGET;
    draw.position.value = length;
    polyspec_verify_params p = polyspec_verify_params_default();
    p.batch = 1;
    p.draft_len = count;
    p.vocab = p.draft_vocab = VOCAB;
    p.target_logits = target;
    p.target_stride[0] = (K + 1) * VOCAB;
    p.target_stride[1] = VOCAB;
    p.draft_logits = count > 0 ? draft : NULL;
    p.draft_stride[0] = K * VOCAB;
    p.draft_stride[1] = VOCAB;
    p.draft_statistics = count > 0 ? statistics : NULL;
    p.draft_tokens = text + length;
    p.draft_tokens_stride = count;
    p.sampling = &sampling;
    p.draw = &draw;
    p.tokens = emitted; /* the accepted letters, then a correction or one more */
    p.num_accepted = &accepted;
    p.logprobs = logprobs;
    p.status = &status;
    if (failed(polyspec_verify(&p, NULL), &status)) return 0;
    memcpy(text + length, emitted, (size_t)(accepted + 1) * sizeof *text);
    length += accepted + 1;
    ++passes;
  }
  return passes;
}

int main(int count, char** words) {
  int64_t text[LENGTH], plain[LENGTH];
  char* end = NULL;
  const float temperature = count > 1 ? strtof(words[1], &end) : 0.0f;
  if (count > 2 || (end != NULL && (end == words[1] || *end != '\0'))) {
    fprintf(stderr, "Usage: program [temperature]\n");
    return 2;
  }
  const int passes = generate(K, temperature, text);
  if (passes == 0) return 1;
  for (int i = 0; i < LENGTH; ++i) putchar("abcdefghijklmnopqrstuvwxyz "[text[i]]);
  printf("\n%d letters in %d passes of the target\n", LENGTH - 1, passes);
  if (temperature > 0.0f) return 0;
  if (generate(0, temperature, plain) == 0) return 1;
  const int same = memcmp(text, plain, sizeof text) == 0;
  printf("%s plain decoding\n", same ? "the same text as" : "DIFFERS from");
  return same ? 0 : 1;
}

/* Assertions of the C tests: they print file, line and the library's last error, and end with
 * status 1.
 */
#ifndef POLYSPEC_TESTS_C_CHECK_H_
#define POLYSPEC_TESTS_C_CHECK_H_

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "polyspec/polyspec.h"

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      fprintf(stderr, "%s:%d: check failed: %s\n  last error: %s\n", __FILE__, __LINE__, \
              #condition, polyspec_last_error());                                        \
      exit(1);                                                                           \
    }                                                                                    \
  } while (0)

#define CHECK_CODE(expected, call)                                                            \
  do {                                                                                        \
    const polyspec_code got_ = (call);                                                        \
    if (got_ != (expected)) {                                                                 \
      fprintf(stderr, "%s:%d: %s\n  expected: %s\n  got:      %s (%s)\n", __FILE__, __LINE__, \
              #call, polyspec_code_string(expected), polyspec_code_string(got_),              \
              polyspec_last_error());                                                         \
      exit(1);                                                                                \
    }                                                                                         \
  } while (0)

/* The call is refused, and says why. */
#define CHECK_REFUSED(said, call)                       \
  do {                                                  \
    CHECK_CODE(POLYSPEC_INVALID_ARGUMENT, call);        \
    CHECK(strstr(polyspec_last_error(), said) != NULL); \
  } while (0)

#endif /* POLYSPEC_TESTS_C_CHECK_H_ */

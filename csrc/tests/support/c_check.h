/* Assertion of the C tests: names the place and the library's last error, and ends with status 1.
 */
#ifndef POLYSPEC_TESTS_C_CHECK_H_
#define POLYSPEC_TESTS_C_CHECK_H_

#include <stdio.h>
#include <stdlib.h>

#include "polyspec/polyspec.h"

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      fprintf(stderr, "%s:%d: check failed: %s\n  last error: %s\n", __FILE__, __LINE__, \
              #condition, polyspec_last_error());                                        \
      exit(1);                                                                           \
    }                                                                                    \
  } while (0)

#endif /* POLYSPEC_TESTS_C_CHECK_H_ */

// Assertions for the CTest programs. A failed check prints file:line, the expected and the actual
// value, and ends the program with status 1. No framework: a test is a main() that calls functions.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>

namespace check {

template <class T>
std::string text(const T& value) {
  std::ostringstream out;
  out.precision(17);
  out << value;
  return out.str();
}

[[noreturn]] inline void fail(const char* file, int line, const std::string& expected,
                              const std::string& got) {
  std::fflush(stdout);
  std::fprintf(stderr, "%s:%d: check failed\n  expected: %s\n  got:      %s\n", file, line,
               expected.c_str(), got.c_str());
  std::exit(1);
}

// True when running `body` throws exactly an E or something derived from it.
template <class E, class Body>
bool throws(Body&& body) {
  try {
    body();
  } catch (const E&) {
    return true;
  } catch (...) {
    return false;
  }
  return false;
}

}  // namespace check

#define CHECK(condition)                                                    \
  do {                                                                      \
    if (!(condition)) check::fail(__FILE__, __LINE__, #condition, "false"); \
  } while (0)

#define CHECK_EQ(expected, got)                                                          \
  do {                                                                                   \
    const auto expected_ = (expected);                                                   \
    const auto got_ = (got);                                                             \
    if (!(expected_ == got_))                                                            \
      check::fail(__FILE__, __LINE__, std::string(#got " == ") + check::text(expected_), \
                  check::text(got_));                                                    \
  } while (0)

// A NaN on either side fails.
#define CHECK_NEAR(expected, got, tolerance)                                               \
  do {                                                                                     \
    const double expected_ = (expected);                                                   \
    const double got_ = (got);                                                             \
    if (!(std::fabs(expected_ - got_) <= (tolerance)))                                     \
      check::fail(__FILE__, __LINE__,                                                      \
                  std::string(#got " within " #tolerance " of ") + check::text(expected_), \
                  check::text(got_));                                                      \
  } while (0)

#define CHECK_BELOW(limit, got)                                                      \
  do {                                                                               \
    const double limit_ = (limit);                                                   \
    const double got_ = (got);                                                       \
    if (!(got_ < limit_))                                                            \
      check::fail(__FILE__, __LINE__, std::string(#got " < ") + check::text(limit_), \
                  check::text(got_));                                                \
  } while (0)

#define CHECK_ABOVE(limit, got)                                                      \
  do {                                                                               \
    const double limit_ = (limit);                                                   \
    const double got_ = (got);                                                       \
    if (!(got_ > limit_))                                                            \
      check::fail(__FILE__, __LINE__, std::string(#got " > ") + check::text(limit_), \
                  check::text(got_));                                                \
  } while (0)

#define CHECK_THROWS(type, ...)                                                            \
  do {                                                                                     \
    if (!check::throws<type>([&] { __VA_ARGS__; }))                                        \
      check::fail(__FILE__, __LINE__, #__VA_ARGS__ " throws " #type, "no such exception"); \
  } while (0)

/* Exports of a shared library: the functions and classes of the public headers, nothing else. */
#ifndef POLYSPEC_EXPORT_H_
#define POLYSPEC_EXPORT_H_

#if defined(__GNUC__) || defined(__clang__)
#define POLYSPEC_API __attribute__((visibility("default")))
#else
#define POLYSPEC_API
#endif

#endif /* POLYSPEC_EXPORT_H_ */

#!/bin/sh
# Compiler launcher for CUDA files: writes the compiler's output to <object>.log,
# for csrc/tests/gpu/kernel_budget_test.cpp, and shows all of it but ptxas's account of resources.
object=
previous=
for argument in "$@"; do
  [ "$previous" = -o ] && object=$argument
  previous=$argument
done
[ -n "$object" ] || exec "$@"
"$@" >"$object.log" 2>&1
code=$?
grep -v -e '^ptxas info' -e 'bytes stack frame' -e '^$' "$object.log"
exit $code

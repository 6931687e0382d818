#!/usr/bin/env bash
# clang-tidy over the sources given, or over all of src/ and python/src/. Its own build folder is only
# configured: clang cannot read the precompiled headers of g++.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mkdir -p build
cmake --preset tidy >build/tidy.log || { cat build/tidy.log; exit 1; }
cmake --build build/tidy --target hopshard_build_id -- --quiet
if (($# == 0)); then
  mapfile -t files < <(find src python/src -name '*.cpp' | sort)
else
  files=("$@")
fi
printf '%s\n' "${files[@]}" |
  xargs -P "$(nproc)" -n 1 clang-tidy --quiet -p build/tidy 2> >(grep -v 'warnings generated' >&2)

# Script: writes OUTPUT, a header with "<VERSION>+<hash of all C++ sources>", if it changed.
file(GLOB_RECURSE sources RELATIVE "${SOURCE_DIR}" "${SOURCE_DIR}/include/*.hpp" "${SOURCE_DIR}/src/*.?pp"
     "${SOURCE_DIR}/python/src/*.?pp")
list(SORT sources)
set(all "")
foreach(source IN LISTS sources)
  file(SHA256 "${SOURCE_DIR}/${source}" hash)
  string(APPEND all "${source}=${hash}\n")
endforeach()
string(SHA256 hash "${all}")
string(SUBSTRING "${hash}" 0 16 hash)
file(CONFIGURE OUTPUT "${OUTPUT}" @ONLY CONTENT [[// Generated at build time by cmake/BuildId.cmake.
#pragma once
#define HOPSHARD_BUILD_ID "@VERSION@+@hash@"
]])

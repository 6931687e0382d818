# HOPSHARD_SANITIZE instruments all of our code. torch's own libraries stay as they are; what that
# makes impossible to check is in CMakePresets.json (run-time options) and tools/sanitizers/*.supp.
include_guard(GLOBAL)

add_library(hopshard_sanitizers INTERFACE)
if(HOPSHARD_SANITIZE)
  if(NOT HOPSHARD_SANITIZE MATCHES "^(address|undefined|thread)$")
    message(FATAL_ERROR "HOPSHARD_SANITIZE=${HOPSHARD_SANITIZE}: legal are address, undefined, thread")
  endif()
  set(flags -fsanitize=${HOPSHARD_SANITIZE} -fno-omit-frame-pointer)
  if(HOPSHARD_SANITIZE STREQUAL "undefined")
    # vptr checks need the type information of torch's hidden classes.
    list(APPEND flags -fno-sanitize-recover=all -fno-sanitize=vptr)
  endif()
  target_compile_options(hopshard_sanitizers INTERFACE ${flags})
  target_link_options(hopshard_sanitizers INTERFACE ${flags})
endif()

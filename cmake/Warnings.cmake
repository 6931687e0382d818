# The warnings that all of our own code is built with. Errors, unless HOPSHARD_WERROR is off.
include_guard(GLOBAL)

add_library(hopshard_warnings INTERFACE)
target_compile_options(
  hopshard_warnings
  INTERFACE -Wall
            -Wextra
            -Wpedantic
            -Wconversion
            -Wsign-conversion
            -Wshadow
            -Wnon-virtual-dtor
            -Woverloaded-virtual
            -Wold-style-cast
            -Wcast-align
            -Wundef
            -Wdouble-promotion
            -Wformat=2
            -Wimplicit-fallthrough
            # -Wextra's warning refuses designated initializers that leave the rest at its default.
            -Wno-missing-field-initializers)
if(HOPSHARD_WERROR)
  target_compile_options(hopshard_warnings INTERFACE -Werror)
endif()

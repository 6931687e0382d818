# hopshard_add_layer() and hopshard_add_test(): how every layer and its tests are declared.
include_guard(GLOBAL)

# Flags of our own code; private, so that consumers of the libraries do not inherit them.
function(hopshard_use_house_flags target)
  target_link_libraries(${target} PRIVATE $<BUILD_INTERFACE:hopshard_warnings>
                                          $<BUILD_INTERFACE:hopshard_sanitizers>)
endfunction()

# One precompiled header for all code that sees tensors: a Tensor-only file takes 0.5 s, not 2.
function(hopshard_add_precompiled_header)
  set(source "${PROJECT_BINARY_DIR}/hopshard_pch.cpp")
  file(CONFIGURE OUTPUT "${source}" CONTENT "// Carries the precompiled header.\n" @ONLY)
  add_library(hopshard_pch OBJECT "${source}")
  target_link_libraries(hopshard_pch PRIVATE hopshard::torch_cpu)
  hopshard_use_house_flags(hopshard_pch)
  target_precompile_headers(
    hopshard_pch
    PRIVATE
    <ATen/core/Tensor.h>
    <algorithm>
    <chrono>
    <condition_variable>
    <cstdint>
    <functional>
    <map>
    <memory>
    <mutex>
    <optional>
    <sstream>
    <string>
    <string_view>
    <thread>
    <utility>
    <vector>)
endfunction()

function(hopshard_reuse_precompiled_header target)
  if(NOT TARGET hopshard_pch)
    hopshard_add_precompiled_header()
  endif()
  target_precompile_headers(${target} REUSE_FROM hopshard_pch)
endfunction()

# hopshard_add_layer(<name> [TENSORS] SOURCES <.cpp>... HEADERS <x.hpp>... DEPENDS <layer>...)
#
#   TENSORS  the layer may include ATen; links torch and reuses the precompiled header
#   SOURCES  relative to src/<folder>/
#   HEADERS  relative to include/hopshard/; public, installed, checked to compile alone
#   DEPENDS  the layers below that its public headers or sources may include
function(hopshard_add_layer name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "TENSORS" "" "SOURCES;HEADERS;DEPENDS")
  set(target hopshard_${name})
  if(arg_SOURCES)
    add_library(${target} STATIC)
    target_sources(${target} PRIVATE ${arg_SOURCES})
    target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/src")
    set(scope PUBLIC)
    hopshard_use_house_flags(${target})
  else()
    add_library(${target} INTERFACE)
    set(scope INTERFACE)
  endif()
  add_library(hopshard::${name} ALIAS ${target})
  set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})

  target_include_directories(${target}
                             ${scope} "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>")
  if(arg_HEADERS)
    list(TRANSFORM arg_HEADERS PREPEND "${PROJECT_SOURCE_DIR}/include/hopshard/")
    target_sources(${target} ${scope} FILE_SET HEADERS BASE_DIRS "${PROJECT_SOURCE_DIR}/include"
                             FILES ${arg_HEADERS})
  endif()
  target_compile_features(${target} ${scope} cxx_std_20)
  foreach(layer IN LISTS arg_DEPENDS)
    target_link_libraries(${target} ${scope} hopshard_${layer})
  endforeach()
  if(arg_TENSORS)
    target_link_libraries(${target} ${scope} hopshard::torch_cpu)
    if(arg_SOURCES)
      hopshard_reuse_precompiled_header(${target})
    endif()
  endif()
  set_property(GLOBAL APPEND PROPERTY HOPSHARD_LAYERS ${target})
endfunction()

# hopshard_add_test(<layer or name> [TENSORS] [NO_CTEST] SOURCES <.cpp>... [DEPENDS <layer>...])
#
# One executable test_<layer> and one ctest entry: loading torch once per case would cost more
# than the cases. Without sources nothing is declared. NO_CTEST: the caller adds the entries, e.g.
# because a launcher starts the executable.
function(hopshard_add_test layer)
  cmake_parse_arguments(PARSE_ARGV 1 arg "TENSORS;NO_CTEST" "TIMEOUT_S" "SOURCES;DEPENDS")
  if(NOT arg_SOURCES)
    return()
  endif()
  set(target test_${layer})
  add_executable(${target} ${arg_SOURCES})
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/tests" "${PROJECT_SOURCE_DIR}/src")
  if(TARGET hopshard_${layer})
    target_link_libraries(${target} PRIVATE hopshard_${layer})
  endif()
  target_link_libraries(${target} PRIVATE GTest::gtest GTest::gtest_main)
  foreach(other IN LISTS arg_DEPENDS)
    target_link_libraries(${target} PRIVATE hopshard_${other})
  endforeach()
  hopshard_use_house_flags(${target})
  if(arg_TENSORS)
    # A precompiled header made with -fPIC is refused under the -fPIE that executables get.
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE -fPIC)
    target_link_libraries(${target} PRIVATE hopshard::torch_cpu)
    hopshard_reuse_precompiled_header(${target})
  endif()
  if(arg_NO_CTEST)
    return()
  endif()
  add_test(NAME ${target} COMMAND ${target} --gtest_brief=1)
  if(NOT arg_TIMEOUT_S)
    set(arg_TIMEOUT_S 300)
  endif()
  set_tests_properties(${target} PROPERTIES TIMEOUT ${arg_TIMEOUT_S} LABELS cpp)
endfunction()

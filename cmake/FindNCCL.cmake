# NCCL's headers, for a backend that loads the library at run time: no toolkit, no linking.
#
#   NCCL_FOUND, NCCL_VERSION   as usual
#   NCCL::headers              nccl.h and the CUDA runtime headers that it includes
#
# Looked for beside torch first, because that is the NCCL which torch loads: its CUDA wheels bring
# nvidia/nccl/include and nvidia/cu<version>/include (before CUDA 13 nvidia/cuda_runtime/include).
# Then in NCCL_ROOT, CUDA_HOME and the system's folders.
include(FindPackageHandleStandardArgs)

set(_nccl_hints "")
set(_nccl_cuda_hints "")
if(TARGET hopshard::torch_cpu)
  get_target_property(_nccl_torch hopshard::torch_cpu IMPORTED_LOCATION)
  # <site-packages>/torch/lib/libtorch_cpu.so
  get_filename_component(_nccl_packages "${_nccl_torch}/../../.." ABSOLUTE)
  file(GLOB _nccl_hints "${_nccl_packages}/nvidia/nccl/include")
  file(GLOB _nccl_cuda_hints "${_nccl_packages}/nvidia/cu[0-9]*/include"
       "${_nccl_packages}/nvidia/cuda_runtime/include")
endif()

find_path(
  NCCL_INCLUDE_DIR nccl.h
  HINTS ${_nccl_hints} ENV NCCL_ROOT
  PATH_SUFFIXES include)
find_path(
  NCCL_CUDA_INCLUDE_DIR cuda_runtime.h
  HINTS ${_nccl_cuda_hints} ENV CUDA_HOME
  PATHS /usr/local/cuda
  PATH_SUFFIXES include)
mark_as_advanced(NCCL_INCLUDE_DIR NCCL_CUDA_INCLUDE_DIR)

if(NCCL_INCLUDE_DIR)
  file(STRINGS "${NCCL_INCLUDE_DIR}/nccl.h" _nccl_defines
       REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) +[0-9]+")
  string(REGEX REPLACE "[^0-9]*NCCL_[A-Z]+ +" "." NCCL_VERSION "${_nccl_defines}")
  string(REGEX REPLACE "^\\.|[^0-9.]" "" NCCL_VERSION "${NCCL_VERSION}")
endif()

find_package_handle_standard_args(
  NCCL
  REQUIRED_VARS NCCL_INCLUDE_DIR NCCL_CUDA_INCLUDE_DIR
  VERSION_VAR NCCL_VERSION)

if(NCCL_FOUND AND NOT TARGET NCCL::headers)
  add_library(NCCL::headers INTERFACE IMPORTED GLOBAL)
  # As system headers, after torch's: they do not pass our warnings.
  target_include_directories(NCCL::headers SYSTEM INTERFACE "${NCCL_INCLUDE_DIR}"
                                                            "${NCCL_CUDA_INCLUDE_DIR}")
endif()

# libfabric (OpenFabrics Interfaces), by pkg-config or in the usual folders.
#
#   OFI_FOUND, OFI_VERSION   as usual
#   OFI::OFI                 the library and its headers
#
# OFI_ROOT (a CMake or environment variable) points to another installation; EFA's installer puts
# its own into /opt/amazon/efa, which is preferred because only that one knows the device.
include(FindPackageHandleStandardArgs)

find_package(PkgConfig QUIET)
if(PkgConfig_FOUND)
  pkg_check_modules(_ofi QUIET libfabric)
endif()
find_path(
  OFI_INCLUDE_DIR rdma/fi_domain.h
  HINTS ${OFI_ROOT} ENV OFI_ROOT /opt/amazon/efa ${_ofi_INCLUDE_DIRS}
  PATH_SUFFIXES include)
find_library(
  OFI_LIBRARY fabric
  HINTS ${OFI_ROOT} ENV OFI_ROOT /opt/amazon/efa ${_ofi_LIBRARY_DIRS}
  PATH_SUFFIXES lib lib64)
mark_as_advanced(OFI_INCLUDE_DIR OFI_LIBRARY)

if(OFI_INCLUDE_DIR)
  file(STRINGS "${OFI_INCLUDE_DIR}/rdma/fabric.h" _ofi_defines
       REGEX "^#define FI_(MAJOR|MINOR)_VERSION +[0-9]+")
  string(REGEX REPLACE "[^0-9]*FI_[A-Z]+_VERSION +" "." OFI_VERSION "${_ofi_defines}")
  string(REGEX REPLACE "^\\.|[^0-9.]" "" OFI_VERSION "${OFI_VERSION}")
endif()

find_package_handle_standard_args(
  OFI
  REQUIRED_VARS OFI_LIBRARY OFI_INCLUDE_DIR
  VERSION_VAR OFI_VERSION)

if(OFI_FOUND AND NOT TARGET OFI::OFI)
  add_library(OFI::OFI UNKNOWN IMPORTED GLOBAL)
  set_target_properties(OFI::OFI PROPERTIES IMPORTED_LOCATION "${OFI_LIBRARY}")
  # As system headers: they do not pass our warnings.
  target_include_directories(OFI::OFI SYSTEM INTERFACE "${OFI_INCLUDE_DIR}")
endif()

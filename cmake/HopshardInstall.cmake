# Installs headers, libraries and the CMake package, so that find_package(hopshard) works.
# The Python wheel takes only the component "python" (python/src/CMakeLists.txt).
include_guard(GLOBAL)
include(CMakePackageConfigHelpers)

get_property(HOPSHARD_INSTALLED_WITH_MPI GLOBAL PROPERTY HOPSHARD_HAS_MPI)
get_property(HOPSHARD_INSTALLED_WITH_OFI GLOBAL PROPERTY HOPSHARD_HAS_OFI)
string(REGEX MATCH "^[0-9]+\\.[0-9]+" HOPSHARD_TORCH_MINOR "${HOPSHARD_TORCH_VERSION}")
set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/hopshard")
get_property(layers GLOBAL PROPERTY HOPSHARD_LAYERS)
foreach(layer IN LISTS layers)
  get_target_property(header_sets ${layer} INTERFACE_HEADER_SETS)
  set(header_set)
  if(header_sets)
    set(header_set FILE_SET HEADERS DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT devel)
  endif()
  install(
    TARGETS ${layer}
    EXPORT hopshardTargets
    ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT devel
    ${header_set})
endforeach()
install(
  EXPORT hopshardTargets
  NAMESPACE hopshard::
  DESTINATION "${package_dir}"
  COMPONENT devel)

configure_package_config_file(cmake/hopshardConfig.cmake.in hopshardConfig.cmake
                              INSTALL_DESTINATION "${package_dir}")
write_basic_package_version_file(hopshardConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(
  FILES "${PROJECT_BINARY_DIR}/hopshardConfig.cmake"
        "${PROJECT_BINARY_DIR}/hopshardConfigVersion.cmake" cmake/HopshardTorch.cmake
        cmake/FindOFI.cmake
  DESTINATION "${package_dir}"
  COMPONENT devel)

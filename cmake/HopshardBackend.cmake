# Backends whose library may be absent: HOPSHARD_WITH_<NAME> = AUTO (the default: built if its
# library is found), ON (an error if it is not) or OFF. Used in src/comm/backends/<name>/:
#
#   include(HopshardBackend)
#   hopshard_backend_option(MPI "Open MPI")
#   if(HOPSHARD_WITH_MPI)
#     find_package(...)
#   endif()
#   hopshard_choose_backend(MPI FOUND "${MPI_CXX_FOUND}" MISSING "no mpi.h: install libopenmpi-dev"
#                           SOURCES mpi.cpp)
#   if(HOPSHARD_HAS_MPI)
#     target_link_libraries(hopshard_comm ...)
#   endif()
include_guard(GLOBAL)

# Declares the cache variable; in the caller it is false if the backend is switched off.
function(hopshard_backend_option name title)
  set(variable HOPSHARD_WITH_${name})
  set(${variable} AUTO CACHE STRING "Build the backend on ${title}: AUTO (if found), ON or OFF")
  set_property(CACHE ${variable} PROPERTY STRINGS AUTO ON OFF)
  if(NOT "${${variable}}" MATCHES "^(AUTO|ON|OFF|TRUE|FALSE|YES|NO|1|0)$")
    message(FATAL_ERROR "${variable}=${${variable}}: legal are AUTO, ON, OFF")
  endif()
  # "AUTO" as a string is false in if(); a caller asks only "on or off".
  if("${${variable}}" STREQUAL "AUTO" OR "${${variable}}")
    set(${variable} ON PARENT_SCOPE)
  else()
    set(${variable} OFF PARENT_SCOPE)
  endif()
endfunction()

# hopshard_choose_backend(<NAME> FOUND <bool> MISSING <text> SOURCES <.cpp>...)
#
# Adds SOURCES to hopshard_comm and sets HOPSHARD_HAS_<NAME>, also as a global property for the
# tests and the Python module. If the library is not FOUND, or the backend is switched off, it adds
# the folder's unavailable.cpp instead, which sees the reason as HOPSHARD_BACKEND_MISSING.
#
#   MISSING  what was looked for in vain and how to get it; a user reads it in `hopshard doctor`
function(hopshard_choose_backend name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "FOUND;MISSING" "SOURCES")
  set(variable HOPSHARD_WITH_${name})
  set(asked "$CACHE{${variable}}")
  set(has FALSE)
  if(NOT "${asked}" STREQUAL "AUTO" AND NOT "${asked}")
    set(reason "switched off when this build was configured (${variable}=${asked})")
  elseif(arg_FOUND)
    set(has TRUE)
  elseif(NOT "${asked}" STREQUAL "AUTO")
    message(FATAL_ERROR "${variable}=${asked}, but ${arg_MISSING}")
  else()
    set(reason "${arg_MISSING}, then build hopshard again")
  endif()

  if(has)
    target_sources(hopshard_comm PRIVATE ${arg_SOURCES})
    message(STATUS "Backend ${name}: built")
  else()
    target_sources(hopshard_comm PRIVATE unavailable.cpp)
    set_source_files_properties(
      unavailable.cpp TARGET_DIRECTORY hopshard_comm
      PROPERTIES COMPILE_DEFINITIONS "HOPSHARD_BACKEND_MISSING=\"${reason}\""
                 SKIP_PRECOMPILE_HEADERS ON)
    message(STATUS "Backend ${name}: not built: ${reason}")
  endif()
  set_property(GLOBAL PROPERTY HOPSHARD_HAS_${name} ${has})
  set(HOPSHARD_HAS_${name} ${has} PARENT_SCOPE)
endfunction()

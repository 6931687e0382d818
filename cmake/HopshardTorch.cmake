# torch as our own imported targets, from the paths that torch.utils.cpp_extension reports.
# find_package(Torch) from a CUDA wheel asks for a CUDA toolkit; a CPU-only machine has none.
#
#   hopshard::torch_cpu     libtorch_cpu + libc10, ATen and c10 headers
#   hopshard::torch_python  + libtorch_python, Python headers, the pybind11 that torch was built with
#
# Also used by an installed hopshardConfig.cmake, so it depends on nothing else in this folder.
include_guard(GLOBAL)

# Defines the targets. PYTHON TRUE adds hopshard::torch_python and Python_add_library().
function(hopshard_find_torch)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "PYTHON" "")
  if(TARGET hopshard::torch_cpu AND (TARGET hopshard::torch_python OR NOT arg_PYTHON))
    # Another project of the same build asks again.
    get_property(version GLOBAL PROPERTY HOPSHARD_TORCH_VERSION)
    set(HOPSHARD_TORCH_VERSION "${version}" PARENT_SCOPE)
    return()
  endif()

  if(NOT Python_EXECUTABLE AND EXISTS "${PROJECT_SOURCE_DIR}/.venv/bin/python")
    set(Python_EXECUTABLE "${PROJECT_SOURCE_DIR}/.venv/bin/python" CACHE FILEPATH
                                                                         "Interpreter that has torch")
  endif()
  set(components Interpreter)
  if(arg_PYTHON)
    list(APPEND components Development.Module)
  endif()
  find_package(Python 3.11 REQUIRED COMPONENTS ${components})

  # The second try is for `pip install .`: its build isolation hides the installed torch by PYTHONPATH.
  # stderr is dropped on success: importing cpp_extension warns on machines without a GPU.
  set(query
      [[
import torch, torch.utils.cpp_extension as e
print(torch.__version__.split("+")[0])
print(int(torch._C._GLIBCXX_USE_CXX11_ABI))
print("|".join(e.include_paths()))
print("|".join(e.library_paths()))
]])
  foreach(environment IN ITEMS "" "--unset=PYTHONPATH")
    execute_process(
      COMMAND "${CMAKE_COMMAND}" -E env ${environment} "${Python_EXECUTABLE}" -c "${query}"
      OUTPUT_VARIABLE answer
      ERROR_VARIABLE trouble
      RESULT_VARIABLE code
      OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(code EQUAL 0)
      break()
    endif()
  endforeach()
  if(NOT code EQUAL 0)
    message(
      FATAL_ERROR
        "${Python_EXECUTABLE} cannot import torch. Install torch >= 2.11 there, or point to another "
        "interpreter with -DPython_EXECUTABLE=/path/to/python.\n${trouble}")
  endif()
  string(REGEX MATCH "^([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)$" matched "${answer}")
  set(version "${CMAKE_MATCH_1}")
  set(cxx11_abi "${CMAKE_MATCH_2}")
  string(REPLACE "|" ";" include_dirs "${CMAKE_MATCH_3}")
  string(REPLACE "|" ";" library_dirs "${CMAKE_MATCH_4}")
  if(version VERSION_LESS 2.11)
    message(FATAL_ERROR "hopshard needs torch >= 2.11, ${Python_EXECUTABLE} has ${version}")
  endif()
  message(STATUS "torch ${version} of ${Python_EXECUTABLE}")

  foreach(name IN ITEMS c10 torch_cpu torch_python)
    find_library(
      HOPSHARD_LIB_${name}
      NAMES ${name}
      PATHS ${library_dirs}
      NO_DEFAULT_PATH NO_CACHE REQUIRED)
  endforeach()

  if(NOT TARGET hopshard::torch_cpu)
    add_library(hopshard::c10 SHARED IMPORTED GLOBAL)
    set_target_properties(hopshard::c10 PROPERTIES IMPORTED_LOCATION "${HOPSHARD_LIB_c10}")
    add_library(hopshard::torch_cpu SHARED IMPORTED GLOBAL)
    set_target_properties(hopshard::torch_cpu PROPERTIES IMPORTED_LOCATION "${HOPSHARD_LIB_torch_cpu}")
    target_include_directories(hopshard::torch_cpu SYSTEM INTERFACE ${include_dirs})
    target_compile_features(hopshard::torch_cpu INTERFACE cxx_std_20)
    target_compile_definitions(hopshard::torch_cpu INTERFACE _GLIBCXX_USE_CXX11_ABI=${cxx11_abi})
    # The NVIDIA libraries of a CUDA wheel are found at run time by the RPATH of torch's own
    # libraries, which the linker does not follow.
    target_link_options(hopshard::torch_cpu INTERFACE LINKER:--allow-shlib-undefined)
    target_link_libraries(hopshard::torch_cpu INTERFACE hopshard::c10)
  endif()

  if(arg_PYTHON AND NOT TARGET hopshard::torch_python)
    add_library(hopshard::torch_python SHARED IMPORTED GLOBAL)
    set_target_properties(hopshard::torch_python PROPERTIES IMPORTED_LOCATION
                                                            "${HOPSHARD_LIB_torch_python}")
    target_include_directories(hopshard::torch_python SYSTEM INTERFACE ${Python_INCLUDE_DIRS})
    target_link_libraries(hopshard::torch_python INTERFACE hopshard::torch_cpu)
  endif()

  set_property(GLOBAL PROPERTY HOPSHARD_TORCH_VERSION "${version}")
  set(HOPSHARD_TORCH_VERSION "${version}" PARENT_SCOPE)
  # Python_EXECUTABLE and the SOABI are needed by Python_add_library() in the caller's scope.
  foreach(variable IN ITEMS Python_EXECUTABLE Python_SOABI Python_FOUND Python_Interpreter_FOUND)
    set(${variable} "${${variable}}" PARENT_SCOPE)
  endforeach()
endfunction()

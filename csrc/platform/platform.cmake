# Resolves LLAMAC_PLATFORM and defines llamac_platform: the flags and libraries that everything is built with; and
# llamac_runtime: the device's libraries, for programs. In a Python process with torch they are torch's.
include(${CMAKE_CURRENT_LIST_DIR}/compiler.cmake)
if(LLAMAC_PLATFORM STREQUAL auto)
  llamac_detect_platform(LLAMAC_PLATFORM)
endif()
message(STATUS "llamac platform: ${LLAMAC_PLATFORM}")
llamac_find_compiler(${LLAMAC_PLATFORM} LLAMAC_COMPILER)
if(NOT LLAMAC_COMPILER)
  message(FATAL_ERROR "llamac: no ${LLAMAC_COMPILER_${LLAMAC_PLATFORM}} compiler was found. `make setup "
    "PLATFORM=${LLAMAC_PLATFORM}` says what to install; -DLLAMAC_PLATFORM=cpu works without it.")
endif()

# No code of ours reads errno or floating-point traps; without these, sqrt and exp do not vectorise.
set(LLAMAC_HOST_FLAGS -fno-math-errno -fno-trapping-math)
# Kernels say "#pragma unroll", which the device compilers know.
list(APPEND LLAMAC_HOST_FLAGS -Wno-unknown-pragmas)
option(LLAMAC_NATIVE "compile for this machine's CPU; off for packages that travel: levels.cmake" ON)
if(LLAMAC_NATIVE)
  list(APPEND LLAMAC_HOST_FLAGS -march=native)
endif()

set(LLAMAC_WARNINGS -Wall -Wextra)
if(CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  list(APPEND LLAMAC_WARNINGS -Wno-restrict)    # GCC bug 105651: "literal" + std::string in C++20
endif()
option(LLAMAC_WERROR "a warning ends the build; off for compilers that nobody has tried" OFF)
if(LLAMAC_WERROR)
  list(APPEND LLAMAC_WARNINGS -Werror)
endif()

add_library(llamac_platform INTERFACE)
add_library(llamac_runtime INTERFACE)
# A message names a file as "csrc/core/tensor.h", wherever the sources were.
target_compile_options(llamac_platform INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:${LLAMAC_WARNINGS};${LLAMAC_HOST_FLAGS};-fmacro-prefix-map=${CMAKE_SOURCE_DIR}/=>")
target_link_libraries(llamac_platform INTERFACE ${CMAKE_DL_LIBS})    # usage.cpp; empty where libc has dlopen
# Says that a build for GPUs has no library of the vendor's for matrix products; what that costs is in docs/log/gemm.md.
function(llamac_warn_without_library library installed_with)
  message(WARNING "llamac: no ${library}. Matrix products, most of a step, are llamac's own, at about half of the library's "
    "speed. Install it with: ${installed_with}")
  string(REGEX REPLACE " .*" "" name "${library}")
  target_compile_definitions(llamac_platform INTERFACE LLAMAC_LACKS="${name}")    # library_gemm.cpp
endfunction()
include(${CMAKE_CURRENT_LIST_DIR}/${LLAMAC_PLATFORM}.cmake)

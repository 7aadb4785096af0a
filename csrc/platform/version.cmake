# What --version says of a build: definitions and a generated header for csrc/run/version.cpp. As a script (cmake -P)
# it writes that header, at each build, and only where the commit has changed.
if(CMAKE_SCRIPT_MODE_FILE)
  cmake_minimum_required(VERSION 3.21...3.31)    # a script has no policies of the project
  set(commit unknown)
  execute_process(COMMAND git -C ${SOURCE} describe --always --abbrev=12 --dirty=\ \(modified\) --exclude=*
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(NOT failed)
    set(commit ${found})
  endif()
  file(CONFIGURE OUTPUT ${OUT} CONTENT "#define LLAMAC_COMMIT \"@commit@\"\n" @ONLY)    # leaves an equal file alone
  return()
endif()

set(header ${CMAKE_BINARY_DIR}/generated/commit.h)
add_custom_target(llamac_commit BYPRODUCTS ${header} VERBATIM
  COMMAND ${CMAKE_COMMAND} -DSOURCE=${CMAKE_SOURCE_DIR} -DOUT=${header} -P ${CMAKE_CURRENT_LIST_FILE})
add_dependencies(llamac llamac_commit)

set(platform ${LLAMAC_PLATFORM})
if(LLAMAC_PLATFORM STREQUAL amd)
  set(platform "amd: ${CMAKE_HIP_ARCHITECTURES}, HIP ${hip_VERSION}")
elseif(LLAMAC_PLATFORM STREQUAL nvidia)
  set(platform "nvidia: ${CMAKE_CUDA_ARCHITECTURES}, CUDA ${CUDAToolkit_VERSION}")
elseif(LLAMAC_NATIVE)
  set(platform "cpu: compiled for the ${CMAKE_SYSTEM_PROCESSOR} that built it")
else()
  set(platform "cpu: compiled for any ${CMAKE_SYSTEM_PROCESSOR}")
endif()
if(LLAMAC_CPU_LEVELS)
  string(REPLACE ";" ", " levels "${LLAMAC_CPU_LEVELS}")
  string(APPEND platform ", operations for ${levels}")
endif()
if(LLAMAC_SANITIZE)
  string(APPEND platform ", sanitizer: ${LLAMAC_SANITIZE}")
endif()
string(REPLACE ";" " " platform "${platform}")
set_source_files_properties(${CMAKE_SOURCE_DIR}/csrc/run/version.cpp PROPERTIES
  INCLUDE_DIRECTORIES ${CMAKE_BINARY_DIR}/generated
  COMPILE_DEFINITIONS
    "LLAMAC_VERSION=\"${PROJECT_VERSION}\";LLAMAC_COMPILER=\"${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}\";LLAMAC_BUILT_FOR=\"${platform}\"")

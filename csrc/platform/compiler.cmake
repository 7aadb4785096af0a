# What dev/platform.sh knows of this machine, for CMake.
set(LLAMAC_PLATFORM_SCRIPT ${CMAKE_CURRENT_LIST_DIR}/../../dev/platform.sh)
set(LLAMAC_COMPILER_amd HIP)
set(LLAMAC_COMPILER_nvidia CUDA)

# Sets `result` to the platform of this machine's device: amd, nvidia or cpu.
function(llamac_detect_platform result)
  execute_process(COMMAND ${LLAMAC_PLATFORM_SCRIPT} OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE
    COMMAND_ERROR_IS_FATAL ANY)
  set(${result} ${found} PARENT_SCOPE)
endfunction()

# Sets `result` to the compiler of the platform's kernels, empty where there is none. CMake alone looks on PATH only, so
# for amd and nvidia it is told: CMAKE_HIP_COMPILER, CMAKE_CUDA_COMPILER, unless the caller has set them.
macro(llamac_find_compiler platform result)
  set(language ${LLAMAC_COMPILER_${platform}})
  set(${result} ${CMAKE_${language}_COMPILER})
  if(NOT ${result})
    execute_process(COMMAND ${LLAMAC_PLATFORM_SCRIPT} compiler ${platform} OUTPUT_VARIABLE ${result}
      OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
    if(language AND ${result})
      set(CMAKE_${language}_COMPILER ${${result}})
    endif()
  endif()
endmacro()

# Sets `result` to the major version of the toolkit that a compiler of amd or nvidia belongs to; empty where it has none.
function(llamac_toolkit_version platform compiler result)
  if(platform STREQUAL nvidia)
    execute_process(COMMAND ${compiler} --version OUTPUT_VARIABLE said)
    string(REGEX MATCH "release ([0-9]+)" found "${said}")
  else()
    # "Found HIP installation: /opt/rocm-7.2.4, version 7.2.53211"
    execute_process(COMMAND ${compiler} -v OUTPUT_QUIET ERROR_VARIABLE said)
    string(REGEX MATCH "Found HIP installation: [^\n]*, version ([0-9]+)" found "${said}")
  endif()
  set(${result} "${CMAKE_MATCH_1}" PARENT_SCOPE)
endfunction()

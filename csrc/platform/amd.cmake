if(CMAKE_VERSION VERSION_LESS 3.25)    # hipblaslt-config.cmake of ROCm 7.1 and later has block()
  message(FATAL_ERROR "llamac: CMake is ${CMAKE_VERSION}, ROCm's libraries need 3.25 or newer: `make setup PLATFORM=amd` "
    "installs one into .venv, which make then uses; for CMake alone: pip install cmake")
endif()
set(LLAMAC_LANGUAGE HIP)
# The architectures of the devices that are there. Without one: those that llamac is for, as far as the compiler knows them.
if(NOT DEFINED CMAKE_HIP_ARCHITECTURES)
  execute_process(COMMAND ${LLAMAC_PLATFORM_SCRIPT} architectures OUTPUT_VARIABLE CMAKE_HIP_ARCHITECTURES
    COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "gfx[0-9a-f]+" CMAKE_HIP_ARCHITECTURES "${CMAKE_HIP_ARCHITECTURES}")
  if(NOT CMAKE_HIP_ARCHITECTURES)
    set(CMAKE_HIP_ARCHITECTURES gfx942 gfx90a gfx1100)
    execute_process(COMMAND ${CMAKE_HIP_COMPILER} -x hip --offload-arch=gfx950 --cuda-device-only -nogpuinc -c /dev/null
      -o /dev/null RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
    if(NOT failed)
      list(APPEND CMAKE_HIP_ARCHITECTURES gfx950)
    endif()
  endif()
endif()
if(CMAKE_HIP_ARCHITECTURES MATCHES "gfx12[0-9a-f]*")
  message(FATAL_ERROR "llamac: expected gfx90a, gfx942, gfx950 or gfx11, found ${CMAKE_MATCH_0}, whose matrix instructions "
    "no kernel is written for: name others with -DCMAKE_HIP_ARCHITECTURES=gfx942, or build for the CPU with "
    "`make PLATFORM=cpu`")
endif()
set(CMAKE_HIP_STANDARD 20)
set(CMAKE_HIP_STANDARD_REQUIRED ON)
set(CMAKE_HIP_FLAGS_RELEASE "-O3")
enable_language(HIP)
# CMake takes ROCm's folder for one that the loader searches, and would leave it out of the RUNPATH.
if(NOT CMAKE_HIP_COMPILER_ROCM_LIB)    # older CMake
  set(CMAKE_HIP_COMPILER_ROCM_LIB ${CMAKE_HIP_COMPILER_ROCM_ROOT}/lib)
endif()
if(NOT CMAKE_HIP_COMPILER_ROCM_LIB IN_LIST CMAKE_CXX_IMPLICIT_LINK_DIRECTORIES)
  list(REMOVE_ITEM CMAKE_HIP_IMPLICIT_LINK_DIRECTORIES ${CMAKE_HIP_COMPILER_ROCM_LIB})
endif()
# Of several ROCms, the compiler's. In the prefix path, as what a package depends on is not looked for in HINTS.
set(before "${CMAKE_PREFIX_PATH}")
list(APPEND CMAKE_PREFIX_PATH ${CMAKE_HIP_COMPILER_ROCM_ROOT})
find_package(hip REQUIRED CONFIG)    # hip::host: the runtime, for plain C++
find_package(hipblaslt QUIET CONFIG)
set(CMAKE_PREFIX_PATH "${before}")
function(llamac_compile_with library)    # its headers, not its file
  target_include_directories(llamac_platform SYSTEM INTERFACE $<TARGET_PROPERTY:${library},INTERFACE_INCLUDE_DIRECTORIES>)
  target_compile_definitions(llamac_platform INTERFACE $<TARGET_PROPERTY:${library},INTERFACE_COMPILE_DEFINITIONS>)
endfunction()
llamac_compile_with(hip::host)
target_compile_definitions(llamac_platform INTERFACE LLAMAC_AMD)
if(hipblaslt_FOUND)
  target_compile_definitions(llamac_platform INTERFACE LLAMAC_BLASLT)
  llamac_compile_with(roc::hipblaslt)
  target_link_libraries(llamac_runtime INTERFACE roc::hipblaslt)
else()
  if(NOT hipblaslt_NOT_FOUND_MESSAGE)
    set(hipblaslt_NOT_FOUND_MESSAGE "no hipblaslt-config.cmake below ${CMAKE_HIP_COMPILER_ROCM_ROOT}")
  endif()
  llamac_warn_without_library("hipBLASLt (${hipblaslt_NOT_FOUND_MESSAGE})"
    "apt-get install hipblaslt-dev (Debian: libhipblaslt-dev libhipblas-common-dev)")
endif()
# pass-failed: what gcc vectorises, clang may not; that is slower on the host, not wrong.
target_compile_options(llamac_platform INTERFACE
  "$<$<COMPILE_LANGUAGE:HIP>:${LLAMAC_WARNINGS};-Wno-pass-failed;-Wno-unknown-warning-option;${LLAMAC_HOST_FLAGS}>")
# One OpenMP runtime, the HIP compiler's: libomp also answers the calls that gcc makes to libgomp. The compiler may be a
# script that calls it from elsewhere.
execute_process(COMMAND ${CMAKE_HIP_COMPILER} -print-file-name=libomp.so OUTPUT_VARIABLE LLAMAC_OMP
  OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT IS_ABSOLUTE "${LLAMAC_OMP}")    # it is as it was asked for
  message(FATAL_ERROR "llamac: ${CMAKE_HIP_COMPILER} has no OpenMP (libomp.so). Install it with: apt-get install "
    "openmp-extras-runtime (Debian: libomp-dev of the compiler's version)")
endif()
get_filename_component(LLAMAC_OMP ${LLAMAC_OMP} ABSOLUTE)
target_compile_options(llamac_platform INTERFACE "$<$<COMPILE_LANGUAGE:CXX,HIP>:-fopenmp>")
target_link_libraries(llamac_platform INTERFACE ${LLAMAC_OMP})
target_link_libraries(llamac_runtime INTERFACE hip::host)

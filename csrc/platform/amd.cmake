set(LLAMAC_LANGUAGE HIP)
if(NOT DEFINED CMAKE_HIP_ARCHITECTURES)
  set(CMAKE_HIP_ARCHITECTURES gfx942 gfx90a)
endif()
set(CMAKE_HIP_STANDARD 17)
set(CMAKE_HIP_STANDARD_REQUIRED ON)
set(CMAKE_HIP_FLAGS_RELEASE "-O3")
enable_language(HIP)
find_package(hip REQUIRED CONFIG HINTS ${CMAKE_HIP_COMPILER_ROCM_ROOT})    # hip::host: the runtime, for plain C++
target_compile_definitions(llamac_platform INTERFACE LLAMAC_AMD)
# pass-failed: what gcc vectorises, clang may not; that is slower on the host, not wrong.
target_compile_options(llamac_platform INTERFACE
  "$<$<COMPILE_LANGUAGE:HIP>:-Wall;-Wextra;-Werror;-Wno-pass-failed;${LLAMAC_HOST_FLAGS}>")
# One OpenMP runtime, the HIP compiler's: libomp also answers the calls that gcc makes to libgomp.
get_filename_component(llvm ${CMAKE_HIP_COMPILER} REALPATH)
get_filename_component(llvm ${llvm} DIRECTORY)
find_library(LLAMAC_OMP omp HINTS ${llvm}/../lib REQUIRED)
target_compile_options(llamac_platform INTERFACE "$<$<COMPILE_LANGUAGE:CXX,HIP>:-fopenmp>")
target_link_libraries(llamac_platform INTERFACE hip::host ${LLAMAC_OMP})

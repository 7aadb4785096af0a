set(LLAMAC_LANGUAGE CUDA)
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90a-real)
endif()
set(CMAKE_CUDA_STANDARD 17)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_FLAGS_RELEASE "-O3")
enable_language(CUDA)
find_package(CUDAToolkit REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)
target_compile_definitions(llamac_platform INTERFACE LLAMAC_NVIDIA)
if(CMAKE_CUDA_ARCHITECTURES MATCHES "90a")
  target_compile_definitions(llamac_platform INTERFACE LLAMAC_WARPGROUPS)    # warpgroup.h
endif()
target_link_libraries(llamac_platform INTERFACE CUDA::cudart_static OpenMP::OpenMP_CXX)
# The host's part of a .hip file is compiled like every other host file; OpenMP::OpenMP_CXX speaks to C++ only.
string(REPLACE ";" "," host "-fopenmp;-Wall;-Wextra;-Werror;${LLAMAC_HOST_FLAGS}")
# 1675: its front end does not know the GCC pragmas that the host compiler behind it does.
target_compile_options(llamac_platform INTERFACE
  "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${host};-diag-suppress=1675>")

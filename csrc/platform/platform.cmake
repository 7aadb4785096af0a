# Resolves LLAMAC_PLATFORM and defines llamac_platform: the flags and libraries that everything is built with.
# "auto" looks for the device, not for the compiler: a toolkit on a machine without a GPU is no reason to use it.
if(LLAMAC_PLATFORM STREQUAL auto)
  if(EXISTS /dev/kfd)
    set(LLAMAC_PLATFORM amd)
  elseif(EXISTS /dev/nvidiactl)
    set(LLAMAC_PLATFORM nvidia)
  else()
    set(LLAMAC_PLATFORM cpu)
  endif()
endif()
message(STATUS "llamac platform: ${LLAMAC_PLATFORM}")

add_library(llamac_platform INTERFACE)
# No code of ours reads errno or floating-point traps; without this, sqrt and exp do not vectorise.
target_compile_options(llamac_platform INTERFACE
  "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Werror;-fno-math-errno;-fno-trapping-math>")
include(${CMAKE_CURRENT_LIST_DIR}/${LLAMAC_PLATFORM}.cmake)

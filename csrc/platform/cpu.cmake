set(LLAMAC_LANGUAGE CXX)
find_package(OpenMP REQUIRED COMPONENTS CXX)
find_package(Boost QUIET COMPONENTS context)    # the fibers of llamac_emulation
if(NOT Boost_CONTEXT_FOUND)
  message(FATAL_ERROR "llamac: Boost.Context is missing. Install it with: apt-get install libboost-context-dev")
endif()
set(LLAMAC_WARP 64 CACHE STRING "lanes of a warp of the emulated device: 64 as on MI300X, or 32")
set_property(CACHE LLAMAC_WARP PROPERTY STRINGS 64 32)
option(LLAMAC_EMULATE_FP16 "the emulated device has all kernels in fp16" OFF)
target_compile_definitions(llamac_platform INTERFACE LLAMAC_CPU $<$<BOOL:${LLAMAC_EMULATE_FP16}>:LLAMAC_EMULATE_FP16>)
target_link_libraries(llamac_platform INTERFACE OpenMP::OpenMP_CXX)
set(sanitizers_address address,undefined)
set(sanitizers_thread thread)
if(LLAMAC_SANITIZE)
  # -O0 takes the compiler half as long as -O1, which what computes gets (CMakeLists.txt). -g1: lines, which a report names;
  # variables would take half as long again.
  set_source_files_properties(csrc/platform/emulation/emulation.cpp PROPERTIES COMPILE_OPTIONS -O1)
  set(flags -O0 -g1 -fsanitize=${sanitizers_${LLAMAC_SANITIZE}} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  target_compile_options(llamac_platform INTERFACE ${flags})
  target_link_options(llamac_platform INTERFACE ${flags})
endif()
if(LLAMAC_SANITIZE STREQUAL thread)
  # The emulation tells ThreadSanitizer itself what it does.
  set_source_files_properties(csrc/platform/emulation/emulation.cpp PROPERTIES
    COMPILE_DEFINITIONS LLAMAC_RACES COMPILE_OPTIONS "-O2;-fno-sanitize=thread")
  # How ctest runs a program.
  set(LLAMAC_LAUNCHER setarch -R)                     # it fails with addresses that are randomised too far
  set(LLAMAC_TEST_ENVIRONMENT OMP_THREAD_LIMIT=1)     # it does not know what libgomp orders
endif()

# The emulated device, on which a CPU build runs the GPU's kernels: a library of its own, and all that needs Boost.
add_library(llamac_emulation STATIC csrc/platform/emulation/emulation.cpp)
target_compile_definitions(llamac_emulation PUBLIC LLAMAC_WARP=${LLAMAC_WARP})
target_include_directories(llamac_emulation PUBLIC csrc)
target_link_libraries(llamac_emulation PUBLIC llamac_platform PRIVATE Boost::context)

# The extension llamac._C is for the torch that is installed. Nothing of torch is built with: its headers, c10 and
# torch_cpu are enough. find_package(Torch) would look for a whole CUDA toolkit.
#
# Sets LLAMAC_TORCH, empty where the extension is left out, and LLAMAC_PLATFORM, if it was auto: torch's platform where
# this machine has a compiler for its kernels, else cpu: the extension then serves CPU tensors, beside any torch.
# LLAMAC_WITHOUT_GPU is then what is wrong and what to do, one sentence for whoever brings a GPU's tensors.
include(csrc/platform/compiler.cmake)
set(LLAMAC_TORCH "")
set(LLAMAC_WITHOUT_GPU "")
find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)
# -I: an isolated build hides the interpreter's own packages behind PYTHONPATH.
foreach(flag "" "-I")
  if(NOT LLAMAC_TORCH)
    execute_process(COMMAND ${Python_EXECUTABLE} ${flag} ${CMAKE_CURRENT_LIST_DIR}/torch_facts.py
      OUTPUT_VARIABLE LLAMAC_TORCH ERROR_VARIABLE why OUTPUT_STRIP_TRAILING_WHITESPACE)
  endif()
endforeach()

if(NOT LLAMAC_TORCH)
  string(REGEX MATCH "[^\n]*\n*$" why "${why}")
  string(STRIP "${why}" why)
  message(STATUS "llamac: no PyTorch (${why}), so the extension llamac._C is left out")
  return()
endif()
list(GET LLAMAC_TORCH 0 LLAMAC_TORCH_VERSION)
list(GET LLAMAC_TORCH 1 LLAMAC_TORCH_PLATFORM)
list(GET LLAMAC_TORCH 2 LLAMAC_TORCH_TOOLKIT)
list(GET LLAMAC_TORCH 3 LLAMAC_TORCH_FOLDER)
list(GET LLAMAC_TORCH 4 LLAMAC_TORCH_RUNTIME)
list(GET LLAMAC_TORCH 5 LLAMAC_TORCH_BLASLT)
if(LLAMAC_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "llamac: PyTorch ${LLAMAC_TORCH_VERSION} is installed, 2.11 or newer is needed")
endif()

set(name_amd ROCm)
set(name_nvidia CUDA)
set(name ${name_${LLAMAC_TORCH_PLATFORM}})

# Sets `reason` to why there are no kernels for torch's GPUs; empty where there can be.
function(llamac_why_without_gpu reason)
  set(${reason} "" PARENT_SCOPE)
  if(LLAMAC_PLATFORM STREQUAL cpu)
    set(${reason} "LLAMAC_PLATFORM was cpu" PARENT_SCOPE)
    return()
  endif()
  llamac_find_compiler(${LLAMAC_TORCH_PLATFORM} compiler)
  if(NOT compiler)
    set(${reason} "no ${LLAMAC_COMPILER_${LLAMAC_TORCH_PLATFORM}} compiler was found" PARENT_SCOPE)
    return()
  endif()
  # The names of the runtime's functions, and its structures, change with its major version.
  string(REGEX MATCH "^[0-9]+" wanted "${LLAMAC_TORCH_TOOLKIT}")
  llamac_toolkit_version(${LLAMAC_TORCH_PLATFORM} ${compiler} found)
  if(found STREQUAL "")
    set(${reason} "${compiler} names no ${name}" PARENT_SCOPE)
  elseif(NOT found STREQUAL wanted)
    set(${reason} "${compiler} is of ${name} ${found} and PyTorch of ${LLAMAC_TORCH_TOOLKIT}" PARENT_SCOPE)
  elseif(NOT LLAMAC_TORCH_RUNTIME)
    set(${reason} "PyTorch had loaded no ${name} runtime" PARENT_SCOPE)
  endif()
endfunction()

if(NOT LLAMAC_PLATFORM MATCHES "^(auto|cpu|${LLAMAC_TORCH_PLATFORM})$")
  message(STATUS "llamac: PyTorch ${LLAMAC_TORCH_VERSION} is for ${LLAMAC_TORCH_PLATFORM}, LLAMAC_PLATFORM is "
    "${LLAMAC_PLATFORM}, so the extension llamac._C is left out")
  set(LLAMAC_TORCH "")
  return()
endif()
if(NOT LLAMAC_TORCH_PLATFORM STREQUAL cpu)
  llamac_why_without_gpu(reason)
  string(REGEX MATCH "^[0-9]+" major "${LLAMAC_TORCH_TOOLKIT}")
  set(toolkit "${name} ${major}'s toolkit")
  if(toolkit STREQUAL "CUDA 13's toolkit")    # what dev/setup.sh takes from PyPI
    string(APPEND toolkit " (in llamac's folder: make setup PLATFORM=nvidia TOOLKIT=pip)")
  endif()
  if(reason AND LLAMAC_PLATFORM STREQUAL LLAMAC_TORCH_PLATFORM)
    message(FATAL_ERROR "llamac: no ${name} kernels for PyTorch ${LLAMAC_TORCH_VERSION}, because ${reason}. Install "
      "${toolkit}, or build without: -C cmake.define.LLAMAC_PLATFORM=cpu")
  elseif(reason)
    set(LLAMAC_PLATFORM cpu)
    set(LLAMAC_WITHOUT_GPU "llamac has kernels for the CPU only, because ${reason} when it was built. Install \
${toolkit}, then, in llamac's folder: pip install --no-build-isolation --no-deps -e .")
  endif()
endif()
if(LLAMAC_PLATFORM STREQUAL auto)
  set(LLAMAC_PLATFORM ${LLAMAC_TORCH_PLATFORM})
elseif(LLAMAC_PLATFORM STREQUAL cpu)    # no GPU's library is linked or loaded
  set(LLAMAC_TORCH_RUNTIME "")
  set(LLAMAC_TORCH_BLASLT "")
endif()
message(STATUS "llamac: the extension llamac._C is for PyTorch ${LLAMAC_TORCH_VERSION}, its kernels for ${LLAMAC_PLATFORM}")

# Python's modules, as targets of the root folder.
add_custom_target(llamac_python ALL DEPENDS _native)

find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir
  OUTPUT_VARIABLE folder ERROR_QUIET OUTPUT_STRIP_TRAILING_WHITESPACE)
find_package(pybind11 REQUIRED CONFIG HINTS "${folder}")
# The folders of the HIP compiler's OpenMP, of RCCL and of NCCL's wheel are on no loader's path.
set(module_rpath)
foreach(library IN ITEMS ${LLAMAC_OMP} ${LLAMAC_NCCL_LIBRARY})
  get_filename_component(folder ${library} DIRECTORY)
  if(folder AND NOT folder IN_LIST CMAKE_CXX_IMPLICIT_LINK_DIRECTORIES)
    list(APPEND module_rpath ${folder})
  endif()
endforeach()

# A module exports its entry points alone. The loader would mix everything else of the same name: a statically linked
# libstdc++ with torch's, and the inline variables of llamac's headers, such as an emulated block's threads, of the
# two modules with each other.
set(module_exports -Wl,--version-script,${CMAKE_CURRENT_LIST_DIR}/exports.map)
set(module_folder ${CMAKE_BINARY_DIR}/csrc/python)

# Links objects into a module beside torch: as files, and without llamac_runtime, as the device's runtime is torch's.
# From a target of CUDA or HIP CMake would gather that language's own runtime as well.
function(llamac_link_beside_torch module)
  foreach(kind INCLUDE_DIRECTORIES COMPILE_DEFINITIONS)
    set_property(TARGET ${module} APPEND PROPERTY ${kind} $<TARGET_PROPERTY:llamac_operations,INTERFACE_${kind}>)
  endforeach()
  foreach(objects ${ARGN})
    target_link_libraries(${module} PRIVATE $<TARGET_OBJECTS:${objects}>)
    add_dependencies(${module} ${objects})
  endforeach()
  target_link_libraries(${module} PRIVATE llamac_platform llamac_libraries $<TARGET_NAME_IF_EXISTS:llamac_emulation>
    ${LLAMAC_LEVEL_OBJECTS} ${LLAMAC_TORCH_RUNTIME} ${LLAMAC_TORCH_BLASLT})
endfunction()

# NO_EXTRAS: link-time optimization, one of them, takes half a minute for four files that only pass calls on.
set(sources module.cpp arrays.cpp trainer.cpp inference.cpp)
list(TRANSFORM sources PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
pybind11_add_module(_native MODULE NO_EXTRAS ${sources})
target_link_options(_native PRIVATE -s ${module_exports})
# As one source and with -O1, they take a third of the time to compile: most of it goes into pybind11's headers.
set_target_properties(_native PROPERTIES UNITY_BUILD ON INSTALL_RPATH "${module_rpath}" LIBRARY_OUTPUT_DIRECTORY ${module_folder})
target_compile_options(_native PRIVATE -O1)
if(LLAMAC_TORCH)
  llamac_link_beside_torch(_native llamac llamac_operations)
  set_target_properties(_native PROPERTIES BUILD_WITH_INSTALL_RPATH ON)
else()
  target_link_libraries(_native PRIVATE llamac)
  set_target_properties(_native PROPERTIES INSTALL_RPATH_USE_LINK_PATH ON)
endif()

# What the modules were built for: llamac/base/native.py, llamac/base/extension.py and llamac/doctor/installation.py read it.
set(architectures ${CMAKE_${LLAMAC_LANGUAGE}_ARCHITECTURES})
set(libraries ${LLAMAC_TORCH_RUNTIME} ${LLAMAC_TORCH_BLASLT})
foreach(name architectures libraries)
  list(TRANSFORM ${name} REPLACE "(.+)" "\"\\1\"")
  list(JOIN ${name} ", " ${name})
endforeach()
file(WRITE ${module_folder}/_native.json "{\"torch\": \"${LLAMAC_TORCH_VERSION}\", "
  "\"platform\": \"${LLAMAC_TORCH_PLATFORM}\", \"kernels\": \"${LLAMAC_PLATFORM}\", "
  "\"without_gpu\": \"${LLAMAC_WITHOUT_GPU}\", "
  "\"architectures\": [${architectures}], \"libraries\": [${libraries}]}\n")
if(SKBUILD)
  install(FILES ${module_folder}/_native.json DESTINATION llamac)
  install(TARGETS _native LIBRARY DESTINATION llamac)
endif()

if(NOT LLAMAC_TORCH)
  return()
endif()
set(sources torch_ops.cpp torch_compute.cpp torch_autograd.cpp torch_form.cpp torch_linear_cross_entropy.cpp)
list(TRANSFORM sources PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
add_library(_C MODULE ${sources})
llamac_link_beside_torch(_C llamac_operations)
target_include_directories(_C SYSTEM PRIVATE ${LLAMAC_TORCH_FOLDER}/include)
target_link_libraries(_C PRIVATE ${LLAMAC_TORCH_FOLDER}/lib/libc10.so ${LLAMAC_TORCH_FOLDER}/lib/libtorch_cpu.so)
target_link_options(_C PRIVATE ${module_exports} -Wl,--no-undefined)    # what torch has not is missed here, not when it is loaded
# No RPATH for torch's libraries: `import torch`, or llamac/base/native.py, has loaded all of them.
set_target_properties(_C PROPERTIES PREFIX "" CXX_VISIBILITY_PRESET hidden BUILD_WITH_INSTALL_RPATH ON
  INSTALL_RPATH "${module_rpath}" LIBRARY_OUTPUT_DIRECTORY ${module_folder})
add_dependencies(llamac_python _C)
install(TARGETS _C LIBRARY DESTINATION llamac)

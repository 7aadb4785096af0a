# What is not ours comes from the system's packages; what is missing is named with the command that installs it.
add_library(llamac_libraries INTERFACE)

function(llamac_require variable package what)
  if(NOT ${variable})
    message(FATAL_ERROR "llamac: ${what} is missing. Install it with: apt-get install ${package}")
  endif()
endfunction()

find_path(LLAMAC_CLI11 CLI/CLI.hpp)
llamac_require(LLAMAC_CLI11 libcli11-dev "CLI11 (command line)")
find_path(LLAMAC_JSON nlohmann/json.hpp)
llamac_require(LLAMAC_JSON nlohmann-json3-dev "nlohmann/json")
find_path(LLAMAC_TOML toml++/toml.h)
llamac_require(LLAMAC_TOML libtomlplusplus-dev "toml++")
find_path(LLAMAC_XXHASH_INCLUDE xxhash.h)
find_library(LLAMAC_XXHASH xxhash)
llamac_require(LLAMAC_XXHASH libxxhash-dev "xxHash (checksums)")
llamac_require(LLAMAC_XXHASH_INCLUDE libxxhash-dev "xxHash (checksums)")
target_include_directories(llamac_libraries SYSTEM INTERFACE
  ${LLAMAC_CLI11} ${LLAMAC_JSON} ${LLAMAC_TOML} ${LLAMAC_XXHASH_INCLUDE})
target_link_libraries(llamac_libraries INTERFACE ${LLAMAC_XXHASH})

# The CBLAS variants of the matrix products, a yardstick for our own. OpenBLAS's OpenMP build shares our threads; its
# pthreads build would fight them.
option(LLAMAC_CBLAS "build the CBLAS variants of the matrix products" ON)
if(LLAMAC_CBLAS)
  find_path(LLAMAC_CBLAS_INCLUDE cblas.h PATH_SUFFIXES openblas-openmp PATHS /usr/include/${CMAKE_LIBRARY_ARCHITECTURE})
  find_library(LLAMAC_OPENBLAS openblas PATH_SUFFIXES openblas-openmp)
  if(LLAMAC_CBLAS_INCLUDE AND LLAMAC_OPENBLAS)
    target_include_directories(llamac_libraries SYSTEM INTERFACE ${LLAMAC_CBLAS_INCLUDE})
    target_link_libraries(llamac_libraries INTERFACE ${LLAMAC_OPENBLAS})
    target_compile_definitions(llamac_libraries INTERFACE LLAMAC_CBLAS)
  else()
    message(STATUS "llamac: no OpenBLAS, so no CBLAS variants. Install it with: apt-get install libopenblas-openmp-dev")
  endif()
endif()

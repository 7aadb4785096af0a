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

# The tables that C and Python share (configs/tables/*.toml), as strings of the program: csrc/train/tables.h.
set(generated ${CMAKE_BINARY_DIR}/generated)
foreach(table devices)
  set(file ${CMAKE_SOURCE_DIR}/configs/tables/${table}.toml)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
  file(READ ${file} LLAMAC_TABLE_${table})
endforeach()
configure_file(${CMAKE_SOURCE_DIR}/csrc/train/tables.cpp.in ${generated}/tables.cpp @ONLY)
list(APPEND LLAMAC_SOURCES ${generated}/tables.cpp)

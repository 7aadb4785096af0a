# The levels of cpu_level.h: in a CPU build for x86-64 that is not for this machine's processor alone, unless the caller's
# flags name a processor. A sanitizer's own constructors would not survive level.ld.
set(LLAMAC_CPU_LEVELS)
if(LLAMAC_PLATFORM STREQUAL cpu AND CMAKE_SYSTEM_PROCESSOR STREQUAL x86_64 AND NOT LLAMAC_NATIVE AND NOT LLAMAC_SANITIZE
    AND NOT CMAKE_CXX_FLAGS MATCHES "-march=")
  set(LLAMAC_CPU_LEVELS baseline v3 v4)
  find_program(LLAMAC_LD ld.bfd)    # level.ld is in GNU's language, whatever links the program
  find_program(LLAMAC_OBJCOPY objcopy)
  if(NOT LLAMAC_LD OR NOT LLAMAC_OBJCOPY)
    message(FATAL_ERROR "llamac: GNU's ld and objcopy are missing. Install them with: apt-get install binutils; or compile "
      "for one processor: CXXFLAGS=-march=x86-64-v3")
  endif()
endif()
# -mtune decides where g++ fuses a multiplication with an addition, so it is a part of a level's bits: Zen 3's, whose bits
# were compared with those of -march=native on such a processor.
set(flags_baseline)
set(flags_v3 -march=x86-64-v3 -mtune=znver3)
set(flags_v4 -march=x86-64-v4 -mtune=znver3)

# Compiles `sources` for each level, as the object library `name` would, makes an object per level of them, in which all
# symbols are local but the two that cpu_level.cpp asks for, and links these with what links `name`. Sets `result` to them.
function(llamac_add_levels name sources result)
  set(objects)
  add_custom_target(${name}_levels)
  foreach(level IN LISTS LLAMAC_CPU_LEVELS)
    set(library ${name}_${level})
    add_library(${library} OBJECT ${sources})
    foreach(kind INCLUDE_DIRECTORIES COMPILE_DEFINITIONS)
      set_property(TARGET ${library} APPEND PROPERTY ${kind} $<TARGET_PROPERTY:${name},${kind}>)
    endforeach()
    target_link_libraries(${library} PRIVATE llamac_platform llamac_libraries)
    # objcopy leaves unique symbols as they are: g++'s for static variables of templates.
    target_compile_options(${library} PRIVATE ${flags_${level}} $<$<CXX_COMPILER_ID:GNU>:-fno-gnu-unique>)
    set(stem ${CMAKE_BINARY_DIR}/levels/${level})
    configure_file(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/level.ld ${stem}.ld @ONLY)
    add_custom_command(OUTPUT ${stem}.o DEPENDS $<TARGET_OBJECTS:${library}> ${stem}.ld VERBATIM COMMAND_EXPAND_LISTS
      COMMAND ${LLAMAC_LD} -r -T ${stem}.ld -o ${stem}.joined.o $<TARGET_OBJECTS:${library}>
      COMMAND ${LLAMAC_OBJCOPY} --keep-global-symbol=llamac_${level}_begin --keep-global-symbol=llamac_${level}_end
        ${stem}.joined.o ${stem}.o)
    add_dependencies(${name}_levels ${library})    # for make; Ninja knows the objects as files
    list(APPEND objects ${stem}.o)
  endforeach()
  target_sources(${name}_levels PRIVATE ${objects})
  add_dependencies(${name} ${name}_levels)
  target_link_libraries(${name} INTERFACE ${objects})
  set(${result} ${objects} PARENT_SCOPE)
endfunction()

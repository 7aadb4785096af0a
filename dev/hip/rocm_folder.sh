#!/bin/sh
# rocm_folder.sh [DIR]: a folder that looks like a ROCm installation, out of Debian's packages, for machines without
# ROCm. Device code for gfx90a, gfx942 and gfx1100 compiles with it, and programs link. DIR: build/rocm. An existing
# folder is left as it is.
#
# With CMake: ROCM_PATH=$PWD/build/rocm HIPCXX=$PWD/build/rocm/llvm/bin/clang++ cmake ... -DLLAMAC_PLATFORM=amd
set -eu

cd "$(dirname "$0")/../.."
folder=${1:-build/rocm}
[ ! -e "$folder" ] || exit 0
library=/usr/lib/$(uname -m)-linux-gnu
llvm=/usr/lib/llvm-19

for file in $llvm/bin/clang++ $llvm/bin/llvm-dis /usr/include/hip/hip_runtime.h "$library/amdgcn/bitcode/ocml.bc"; do
    [ -e "$file" ] || { echo "rocm_folder.sh: no $file: \`dev/setup.sh targets\` installs its package" >&2; exit 1; }
done

# Built beside its place and renamed: a folder that exists is whole.
new=$folder.$$
trap 'rm -rf "$new"' EXIT
bitcode=$new/amdgcn/bitcode
mkdir -p "$bitcode" "$new/include" "$new/lib/cmake/hip" "$new/lib/cmake/hip-lang" "$new/share/hip"
ln -s $llvm "$new/llvm"
ln -s /usr/include/hip /usr/include/hsa "$new/include/"
ln -s "$library/libamdhip64.so" "$new/lib/"
ln -s "$library"/amdgcn/bitcode/*.bc "$bitcode/"
cp /usr/share/hip/version "$new/share/hip/version"

# The device library reads the architecture's number as a constant, which Debian has up to gfx940 and gfx1036.
constant() {    # constant FROM TO NUMBER
    $llvm/bin/llvm-dis "$bitcode/oclc_isa_version_$1.bc" -o - | sed "s/constant i32 [0-9]*/constant i32 $3/" |
        $llvm/bin/llvm-as -o "$bitcode/oclc_isa_version_$2.bc"
}
[ -e "$bitcode/oclc_isa_version_942.bc" ] || constant 940 942 9402
[ -e "$bitcode/oclc_isa_version_1100.bc" ] || constant 1036 1100 11000

# What find_package(hip) and enable_language(HIP) load; Debian's own want more of ROCm than is packaged.
cat >"$new/lib/cmake/hip/hip-config.cmake" <<'END'
if(NOT TARGET hip::host)
  add_library(hip::host SHARED IMPORTED)
  set_target_properties(hip::host PROPERTIES
    IMPORTED_LOCATION ${CMAKE_CURRENT_LIST_DIR}/../../libamdhip64.so
    INTERFACE_COMPILE_DEFINITIONS __HIP_PLATFORM_AMD__=1
    INTERFACE_SYSTEM_INCLUDE_DIRECTORIES ${CMAKE_CURRENT_LIST_DIR}/../../../include)
endif()
END
cat >"$new/lib/cmake/hip-lang/hip-lang-config.cmake" <<'END'
if(NOT TARGET hip-lang::device)
  add_library(hip-lang::amdhip64 SHARED IMPORTED)
  set_target_properties(hip-lang::amdhip64 PROPERTIES
    IMPORTED_LOCATION ${CMAKE_CURRENT_LIST_DIR}/../../libamdhip64.so)
  add_library(hip-lang::device INTERFACE IMPORTED)
  target_link_libraries(hip-lang::device INTERFACE hip-lang::amdhip64)
endif()
set(_CMAKE_HIP_DEVICE_RUNTIME_TARGET hip-lang::device)
END
mv -T "$new" "$folder"

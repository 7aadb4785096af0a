#!/bin/sh
# rocm_root.sh SUITE LAYOUT [COMMAND]: a Debian with a real ROCm in build/rocm_root/SUITE-LAYOUT, for what compiles and links
# without a GPU (`make rocm`). COMMAND is run in it, in a fresh clone of the last commit.
#
# SUITE: sid, or experimental, which has a newer ROCm and RCCL, over sid. LAYOUT: debian, as it is; amd, which moves
# ROCm to where AMD's packages have it (/opt/rocm -> rocm-7.2.4), where no loader searches. About 3 GB. As root, with
# debootstrap. A root that exists is kept, with its ccache.
. "$(dirname "$0")/debian_root.sh"

case "${1:-} ${2:-}" in "sid debian" | "sid amd" | "experimental debian" | "experimental amd") ;; *)
    echo "$name: expected sid or experimental, then debian or amd, found: $*" >&2
    exit 2 ;;
esac
suite=$1 layout=$2
made=$PWD/build/rocm_root/$suite-$layout

install_rocm() {
    packages="hipcc libamdhip64-dev libhipblaslt-dev libhipblas-common-dev"
    if [ "$suite" = experimental ]; then
        sed -n 's/ sid / experimental /p' "$root/etc/apt/sources.list" >"$root/etc/apt/sources.list.d/experimental.list"
        packages="-t experimental $packages librccl-dev librocm-smi-dev"
    fi
    inside "apt-get update -qq && apt-get install -y -qq --no-install-recommends $packages"
    # OpenMP of the compiler's version; what llamac's set-up installs for several GPUs and for tests; readers of what is linked.
    # shellcheck disable=SC2016 # the root's shell expands it
    inside 'apt-get install -y -qq --no-install-recommends libgloo-dev python3-dev binutils patchelf \
        libomp-$(hipconfig --hipclangpath | sed "s|.*llvm-||; s|/.*||")-dev && apt-get clean'
}

move_to_opt() {
    # shellcheck disable=SC2016 # the root's shell expands it
    inside '
        set -eu
        libraries=/usr/lib/$(dpkg-architecture -q DEB_HOST_MULTIARCH 2>/dev/null || echo "$(uname -m)-linux-gnu")
        release=$(dpkg-query -W -f "\${source:Upstream-Version}" hipcc | sed "s/+.*//")
        llvm=$(dirname "$(hipconfig --hipclangpath)")
        to=/opt/rocm-$release
        mkdir -p $to/lib $to/.info
        ln -s "rocm-$release" /opt/rocm
        echo "$release-1" >$to/.info/version

        # The system has no libomp beside ROCm.
        find "$llvm/lib" -maxdepth 1 -lname "*/${libraries##*/}/*" | while read -r link; do
            cp --remove-destination "$(realpath "$link")" "$link"
        done
        rm "$libraries"/libomp* "$libraries"/libiomp*

        # libucx of Open MPI has an older libamdhip64, without -dev, which stays.
        runtime=$(basename "$(realpath "$libraries/libamdhip64.so")" | sed "s/.*so\.//; s/\..*//")
        dpkg-query -W -f "\${Package}\n" |
            grep -E "^(hipcc|rocminfo|lib(amdhip64-(dev|$runtime)|hiprtc|amd-comgr|hsa-runtime|hipblas|rccl|rocm-smi).*)$" |
            xargs dpkg -L | grep -E "^/usr/(bin|include|lib|share/hip)/" | sort -u | while read -r file; do
            [ -f "$file" ] || [ -L "$file" ] || continue
            new=$to/$(echo "${file#/usr/}" | sed "s|^lib/${libraries##*/}/|lib/|")
            mkdir -p "$(dirname "$new")"
            mv "$file" "$new"
        done
        mv "$llvm" $to/lib/llvm
        ln -s lib/llvm $to/llvm
        ln -s llvm "$to/lib/${llvm##*/}"    # where this hipconfig looks
        mv $to/lib/llvm/lib/clang/*/amdgcn $to/amdgcn
        ln -s clang++ $to/lib/llvm/bin/amdclang++
        ln -s ../lib/llvm/bin/amdclang++ $to/bin/amdclang++
        # One folder less above the configurations of CMake.
        find $to/lib/cmake -name "*.cmake" -exec sed -i -z "s|lib/${libraries##*/}|lib|g; s|/\.\./\.\./\.\./\.\./|/../../../|g
            s|get_filename_component(\([A-Z_]*\) \"\${\1}\" PATH)\n||" {} +
        find $to/lib -maxdepth 1 -name "lib*.so*" -type f -exec patchelf --set-rpath "\$ORIGIN" {} \;
        ldconfig'
}

if [ ! -e "$made" ]; then
    root=$made.new    # what has its own name is whole
    rm -rf "$root" "$root.log" "$root.all.log"
    mkdir -p "$root"
    step "root (sid)" make_root sid
    step "ROCm ($suite)" install_rocm
    [ "$layout" = debian ] || step "AMD's layout" move_to_opt
    mv "$root" "$made"
fi
[ -n "${3:-}" ] || exit 0
root=$made
rm -rf "$root/root/llamac"
clone /root/llamac
inside "cd ~/llamac && export CCACHE_DIR=/root/ccache && $3"

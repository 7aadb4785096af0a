# debian_root.sh, for scripts in this folder that source it: a minimal Debian of debootstrap's in the folder $root, commands in
# it, as the user of number $as (empty: root) with the home $home, and what steps take. $name is the script's, for messages.
# shellcheck shell=sh disable=SC2154    # root is the script's
set -eu
cd "$(dirname "$0")/.."
name=${0##*/} as="" home=/root
[ "$(id -u)" = 0 ] || { echo "$name: needs root, for debootstrap and chroot" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "$name: no debootstrap: apt-get install debootstrap" >&2; exit 1; }

received() { awk 'FILENAME !~ "/lo/" { sum += $1 } END { printf "%.0f", sum }' /sys/class/net/*/statistics/rx_bytes; }
megabytes() { du -sxm "$root" | cut -f1; }

step() {    # step WHAT COMMAND...: runs it and prints what it took
    what=$1
    shift
    start=$(date +%s) bytes=$(received) disk=$(megabytes) status=0
    "$@" >"$root.log" 2>&1 || status=$?
    printf '%-34s %6d s %8d MB received %8d MB of disk\n' "$what" "$(($(date +%s) - start))" \
        "$((($(received) - bytes) / 1000000))" "$(($(megabytes) - disk))"
    cat "$root.log" >>"$root.all.log"
    [ "$status" = 0 ] || { echo "$name: exit status $status; the end of $root.all.log:" >&2; tail -n 30 "$root.log" >&2; exit 1; }
}

# inside COMMAND: as a login on that machine would run it. Mounts are the child's own and end with it.
inside() {
    # shellcheck disable=SC2016 # the inner shell expands it
    unshare --mount --fork sh -c '
        mount --rbind /dev "$0/dev" && mount -t proc proc "$0/proc" && mount -t sysfs -o ro sysfs "$0/sys"
        exec chroot "$0" "$@"' "$root" env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
        HOME="$home" LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive PIP_CERT=/etc/ssl/certs/ca-certificates.crt \
        ${as:+setpriv --reuid=$as --regid=$as --clear-groups} sh -c "$1"
}

make_root() {    # make_root SUITE
    debootstrap --variant=minbase "$1" "$root"
    cp /etc/resolv.conf "$root/etc/resolv.conf"
    # Mirrors of suites that change daily may be behind.
    echo 'Acquire::Check-Valid-Until "false";' >"$root/etc/apt/apt.conf.d/99behind"
    inside 'apt-get update -qq && apt-get install -y -qq git make ca-certificates'
    # This machine's authorities: its network may have one of its own.
    cp "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" "$root/etc/ssl/certs/ca-certificates.crt"
}

clone() {    # clone FOLDER: the last commit, into a folder of the root
    git clone -q . "$root$1"
    git -C "$root$1" log -1 --format='commit %h'
}

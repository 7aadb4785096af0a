#!/bin/sh
# fresh.sh SUITE [user]: the README's two commands, word for word, on a machine that nobody prepared.
#
# As root, with debootstrap: makes a minimal Debian of SUITE (bookworm, trixie) in build/fresh/SUITE, anew each time,
# installs git, make and ca-certificates, clones the last commit, and runs the commands without this machine's caches,
# wheels and environment. With "user" they run as a user who may not install packages: what the first attempt names is
# installed in between. Prints what each step took: seconds, bytes received (by all of this machine), disk.
set -eu
cd "$(dirname "$0")/.."

suite=${1:?expected a Debian suite: bookworm or trixie}
user=${2:+user}
root=$PWD/build/fresh/$suite
[ "$(id -u)" = 0 ] || { echo "fresh.sh: needs root, for debootstrap and chroot" >&2; exit 1; }
command -v debootstrap >/dev/null || { echo "fresh.sh: no debootstrap: apt-get install debootstrap" >&2; exit 1; }

received() { awk 'FILENAME !~ "/lo/" { sum += $1 } END { printf "%.0f", sum }' /sys/class/net/*/statistics/rx_bytes; }
megabytes() { du -sxm "$root" | cut -f1; }

step() {    # step NAME COMMAND...: runs it and prints what it took
    name=$1
    shift
    start=$(date +%s) bytes=$(received) disk=$(megabytes) status=0
    "$@" >"$root.log" 2>&1 || status=$?
    printf '%-34s %6d s %8d MB received %8d MB of disk\n' "$name" "$(($(date +%s) - start))" \
        "$((($(received) - bytes) / 1000000))" "$(($(megabytes) - disk))"
    cat "$root.log" >>"$root.all.log"
    [ "$status" = 0 ] || { echo "fresh.sh: exit status $status; the end of $root.all.log:" >&2; tail -n 30 "$root.log" >&2; exit 1; }
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

make_root() {
    debootstrap --variant=minbase "$suite" "$root"
    cp /etc/resolv.conf "$root/etc/resolv.conf"
    as="" home=/root inside 'apt-get update -qq && apt-get install -y -qq git make ca-certificates'
    # This machine's authorities: its network may have one of its own.
    cp "${SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}" "$root/etc/ssl/certs/ca-certificates.crt"
}

# The lines of the first block of sh under a heading of the README.
command_of() { awk -v heading="## $1" '$0 == heading { on = 1 } on && /^```$/ { exit } on && block { print } on && /^```sh$/ { block = 1 }' README.md; }

rm -rf "$root" "$root.log" "$root.all.log"
mkdir -p "$root"
step "root ($suite)" make_root
as="" home=/root
if [ -n "$user" ]; then
    as=1000 home=/home/user
    mkdir -p "$root$home"
fi
git clone -q . "$root$home/llamac"
git -C "$root$home/llamac" log -1 --format='commit %h'
[ -z "$user" ] || chown -R 1000:1000 "$root$home"

for heading in Train Test; do
    line=$(command_of $heading)
    [ -n "$line" ] || { echo "fresh.sh: README.md has no command under ## $heading" >&2; exit 1; }
    if [ -n "$user" ]; then
        said=$(inside "cd ~/llamac && $line" 2>&1 || true)
        packages=$(printf '%s\n' "$said" | sed -n 's/.*: sudo \(apt-get install .*\)/\1/p')
        if [ -n "$packages" ]; then
            as="" home=/root step "$packages" inside "$(echo "$packages" | sed 's/install/install -y -qq/')"
        fi
    fi
    step "$line" inside "cd ~/llamac && $line"
done
tail -n 3 "$root.log"

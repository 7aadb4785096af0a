#!/bin/sh
# fresh.sh SUITE [user]: the README's two commands, word for word, on a machine that nobody prepared.
#
# As root, with debootstrap: makes a minimal Debian of SUITE (bookworm, trixie) in build/fresh/SUITE, anew each time,
# installs git, make and ca-certificates, clones the last commit, and runs the commands without this machine's caches,
# wheels and environment. With "user" they run as a user who may not install packages: what the first attempt names is
# installed in between. Prints what each step took: seconds, bytes received (by all of this machine), disk.
. "$(dirname "$0")/debian_root.sh"

suite=${1:?expected a Debian suite: bookworm or trixie}
user=${2:+user}
root=$PWD/build/fresh/$suite

# The lines of the first block of sh under a heading of the README.
command_of() { awk -v heading="## $1" '$0 == heading { on = 1 } on && /^```$/ { exit } on && block { print } on && /^```sh$/ { block = 1 }' README.md; }

rm -rf "$root" "$root.log" "$root.all.log"
mkdir -p "$root"
step "root ($suite)" make_root "$suite"
if [ -n "$user" ]; then
    as=1000 home=/home/user
    mkdir -p "$root$home"
fi
clone "$home/llamac"
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
    [ $heading != Train ] || step "without PyTorch" inside "cd ~/llamac && . .venv/bin/activate && cd / && llamac doctor &&
        llamac generate ~/llamac/out && llamac report ~/llamac/out && llamac export gguf ~/llamac/out /tmp/model.gguf"
done
tail -n 3 "$root.log"

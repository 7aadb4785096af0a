#!/bin/bash
# lint.sh [BASE]: checks without building or running anything: clang-format, ruff, codespell, mypy, shellcheck and hadolint
# on all tracked files; clang-tidy (.clang-tidy) on the C++ files that differ from the commit BASE (default: where this
# branch left main; on main, the files of the last commit that is no merge), by the compilation database of LLAMAC_BUILD
# (build/lint).
#
# The tools come from the dependency group `lint` of pyproject.toml; LLAMAC_VENV names another folder than .venv. All
# checks run; the exit status is 1 where one of them failed.
# shellcheck disable=SC2329 # run calls the functions by name
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
tools=${LLAMAC_VENV:-.venv}/bin
jobs=$(getconf _NPROCESSORS_ONLN)
failed=0

for tool in clang-format ruff codespell mypy shellcheck hadolint clang-tidy; do
    if [ ! -x "$tools/$tool" ]; then
        echo "lint.sh: $tools/$tool is missing: make lint" >&2
        exit 2
    fi
done

run() {    # run NAME COMMAND...: says which check failed
    local name=$1
    shift
    echo "lint: $name"
    "$@" || { echo "lint: $name FAILED" >&2; failed=1; }
}
sources() { git ls-files -z -- "$@"; }

check_format() { sources '*.cpp' '*.h' '*.hip' | xargs -0 -n 20 -P "$jobs" "$tools/clang-format" --dry-run --Werror; }
check_spelling() { sources ':!*.bin' ':!*.safetensors' ':!*.png' | xargs -0 "$tools/codespell"; }
check_shell() { sources '*.sh' '*.sbatch' .ci/run | xargs -0 "$tools/shellcheck" -x -P SCRIPTDIR; }
check_tidy() {
    local base=${1:-} database=${LLAMAC_BUILD:-build/lint}
    if [ -z "$base" ]; then
        base=$(git merge-base HEAD origin/main 2>/dev/null || git merge-base HEAD main 2>/dev/null || git rev-parse HEAD)
    fi
    local changed=(git diff --name-only --diff-filter=d "$base" --) headers
    # On main itself, with nothing changed.
    if [ -z "${1:-}" ] && [ "$base" = "$(git rev-parse HEAD)" ] && git diff --quiet HEAD; then
        base=$(git rev-list -1 --no-merges HEAD)^
        changed=(git diff --name-only --diff-filter=d "$base" "${base%^}" --)
    fi
    if [ ! -f "$database/compile_commands.json" ]; then
        echo "lint.sh: $database/compile_commands.json is missing: make lint" >&2
        return 1
    fi
    headers=$("${changed[@]}" 'csrc/*.h' 'dev/hip/*.h' 'tests/*.h' | sed 's|.*|/&|; s|[.+]|\\&|g' | paste -sd '|')
    local files
    files=$("${changed[@]}" 'csrc/*.cpp' 'csrc/*.hip' 'tests/*.cpp' 'dev/hip/*.cpp' | while IFS= read -r file; do
        if grep -qF "/$file\"" "$database/compile_commands.json"; then echo "$file"; fi
    done)
    echo "lint: $(grep -c . <<<"$files") sources that differ from $base"
    # Of the headers, those that changed: seen through the changed sources that include them.
    # Flags of g++ are no error. The wheel has no omp.h: the compiler's, behind all other folders.
    xargs -r -n 1 -P "$jobs" "$tools/clang-tidy" --quiet --header-filter="(${headers:-^$})$" -p "$database" \
        --removed-arg=-fvect-cost-model=dynamic --extra-arg=-Wno-unused-command-line-argument \
        --extra-arg=-idirafter"$(c++ -print-file-name=include)" <<<"$files"
}

run "ruff check" "$tools/ruff" check --quiet .
run "ruff format" "$tools/ruff" format --check --quiet .
run shellcheck check_shell
run hadolint "$tools/hadolint" Containerfile
run codespell check_spelling
run clang-format check_format
run mypy "$tools/mypy"
run clang-tidy check_tidy "${1:-}"
exit $failed

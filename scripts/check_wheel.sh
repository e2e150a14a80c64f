#!/usr/bin/env bash
# Installs the wheel and the sdist of dist/ (`make wheel` makes them) in empty virtual environments, on every Python from
# 3.11 on that this machine has, and has scripts/smoke.py use what was installed. Needs the network or a package index,
# and for the sdist a compiler and liburing. Prints one line for each; the exit status is the number of failures.
#
#     scripts/check_wheel.sh [PYTHON...]     only with these interpreters
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place" || exit 1 # in the checkout its aio_kv, and not the installed one, would be imported

one_of_each_version() { # prints the interpreters from 3.11 on, one for each minor version
    local candidate version seen=" "
    for candidate in python3 python3.{11..15} ~/.pyenv/versions/*/bin/python /usr/bin/python3.*[0-9] /opt/python/cp3*/bin/python; do
        version=$("$candidate" -c 'import sys, venv, ensurepip; print(*sys.version_info[:2], sep=".") if sys.version_info >= (3, 11) else None' 2>/dev/null)
        [ -n "$version" ] && [[ "$seen" != *" $version "* ]] || continue
        seen+="$version "
        "$candidate" -c 'import sys; print(sys.executable)'
    done
}

check() { # PYTHON ARTEFACT LOG: a new environment, the artefact in it, and the smoke test
    rm -rf env work && mkdir work
    "$1" -m venv env || return
    env/bin/python -m pip install --quiet --no-input --disable-pip-version-check -c "$root/constraints.txt" "$2" || return
    env/bin/python -m pip check --disable-pip-version-check || return
    (cd work && timeout 120 ../env/bin/python "$root/scripts/smoke.py")
}

wheels=("$root"/dist/aio_kv-*.whl)
sdists=("$root"/dist/aio_kv-*.tar.gz)
[ "${#wheels[@]}" = 1 ] && [ -e "${wheels[0]}" ] && [ -e "${sdists[0]}" ] || { echo "dist/ holds no wheel and sdist: run make wheel" >&2; exit 2; }
if [ $# = 0 ]; then mapfile -t pythons < <(one_of_each_version); else pythons=("$@"); fi
[ "${#pythons[@]}" != 0 ] || { echo "no Python from 3.11 on was found" >&2; exit 2; }

failures=0
for python in "${pythons[@]}"; do
    for artefact in "${wheels[0]}" "${sdists[0]}"; do
        started=$SECONDS
        if said=$(check "$python" "$artefact" 2>&1 </dev/null); then verdict=ok; else verdict=FAILED; failures=$((failures + 1)); fi
        [ "$verdict" = ok ] || printf '%s\n' "$said" >&2
        printf '%-6s %s  %s  %d s: %s\n' "$verdict" "$("$python" -V)" "${artefact##*/}" $((SECONDS - started)) "${said##*$'\n'}"
    done
done
exit "$failures"

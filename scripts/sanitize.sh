#!/usr/bin/env bash
# Runs the C code under sanitizers: scripts/sanitize.sh address|thread
#
# address: AddressSanitizer and UndefinedBehaviorSanitizer; the C tests, then the Python tests that drive the engine.
# thread:  ThreadSanitizer; the C tests only, because an interpreter that is not instrumented itself hides the
#          synchronisation that TSan would have to see.
# Everything is built under build/sanitize-*; the working tree and .venv keep their normal extension.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
kind=${1:-}
case $kind in
    address) sanitizers=address,undefined ;;
    thread) sanitizers=thread ;;
    *) echo "usage: scripts/sanitize.sh address|thread" >&2; exit 2 ;;
esac
out=$PWD/build/sanitize-$kind
flags=(-std=gnu11 -g -O1 -fno-omit-frame-pointer "-fsanitize=$sanitizers" -fno-sanitize-recover=all -Wall -Wextra
    -Wno-unused-parameter -Inative/include -Inative/src)
libraries=(-Wl,-Bstatic -luring -Wl,-Bdynamic -lpthread)
seconds_per_test=300
runner=()

# A sanitizer's report must fail the run wherever it appears; leaks are the C tests' business, not the interpreter's.
export ASAN_OPTIONS=detect_leaks=1:abort_on_error=0:exitcode=99
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export TSAN_OPTIONS=halt_on_error=1:exitcode=99:second_deadlock_stack=1

say() { printf 'sanitize (%s): %s\n' "$kind" "$*" >&2; }
die() { say "$*"; exit 1; }

find_compiler() { # the first compiler whose runtime is really there: a program is built with it and run
    local candidate
    mkdir -p "$out"
    printf 'int main(void) { return 0; }\n' >"$out/probe.c"
    for candidate in ${CC:+"$CC"} gcc clang cc; do
        if ! command -v "$candidate" >/dev/null; then
            say "$candidate: not installed"
        elif ! "$candidate" "-fsanitize=$sanitizers" "$out/probe.c" -o "$out/probe" 2>"$out/probe.log"; then
            say "$candidate: cannot build with -fsanitize=$sanitizers: $(tail -n 1 "$out/probe.log")"
        elif "$out/probe" 2>"$out/probe.log"; then
            compiler=$candidate
            return
        elif setarch "$(uname -m)" -R "$out/probe" 2>>"$out/probe.log"; then
            # Older TSan runtimes know no address layout with many random bits; without randomisation they start.
            compiler=$candidate
            runner=(setarch "$(uname -m)" -R)
            return
        else
            say "$candidate: a program built with -fsanitize=$sanitizers does not start: $(tail -n 1 "$out/probe.log")"
        fi
    done
    die "no compiler with a working runtime: apt-get install gcc libc6-dev   (or clang and its libclang-rt-*-dev)"
}

at_once() { # runs a command for each further argument, as many at a time as there are processors
    local command=$1
    shift
    export compiler out
    export -f "$command"
    printf '%s\0' "$@" | xargs -0 -n 1 -P "$(nproc)" bash -c "$command \"\$1\"" "$0"
}

compile() { # one C file; the flags travel as one word each, because arrays cannot be exported
    local flags
    mapfile -t flags <<<"$compile_flags"
    "$compiler" "${flags[@]}" -c "$1" -o "$out/${1//\//_}.o"
}

run_c_tests() {
    local source name status objects=() tests=(native/tests/*.c) skipped=0
    [ -e "${tests[0]}" ] || die "native/tests holds no C tests"
    compile_flags=$(printf '%s\n' "${flags[@]}" -Inative/tests)
    export compile_flags
    at_once compile native/src/*.c "${tests[@]}" || die "the C code does not compile"
    for source in native/src/*.c; do objects+=("$out/${source//\//_}.o"); done
    for source in "${tests[@]}"; do
        name=$(basename "$source" .c)
        say "$name"
        "$compiler" "${flags[@]}" "$out/${source//\//_}.o" "${objects[@]}" "${libraries[@]}" -o "$out/$name"
        status=0
        timeout "$seconds_per_test" "${runner[@]}" "$out/$name" || status=$?
        case $status in
            0) ;;
            77) skipped=$((skipped + 1)); say "$name: skipped, for the reason above" ;;
            *) die "$name failed with status $status" ;;
        esac
    done
    say "${#tests[@]} C tests, $skipped of them skipped"
}

# The Python tests that drive the C engine, and of those only the versions that do. Tests of memory sizes, of fork and of
# limits are left out: there the sanitizer's own memory would be measured. So is the cascade, which is Python above all.
python_tests() {
    find tests -name 'test_*.py' -not -name '*cascade*' | LC_ALL=C sort \
        | grep -E '/(test_[a-z_]*(engine|faults|conformance|uring|threaded|reactor)|(engine|conformance|backends)/test_)[a-z_0-9]*' || true
}
python_selection="not memory and not python and not trio and not uvloop and not left_open"

asan_runtime() { # what has to be loaded before the interpreter: the sanitizer, and C++ so that it can wrap exceptions
    local name=libasan.so runtime
    case $("$compiler" --version) in *clang*) name=libclang_rt.asan-$(uname -m).so ;; esac
    runtime=$("$compiler" "-print-file-name=$name")
    [ -e "$runtime" ] || die "$compiler has no shared AddressSanitizer runtime ($name), which the interpreter must preload"
    echo "$runtime $("$compiler" -print-file-name=libstdc++.so.6)"
}

run_python_tests() {
    local tests preload
    mapfile -t tests < <(python_tests)
    [ "${#tests[@]}" != 0 ] || die "no Python tests that drive the engine were found under tests/"
    preload=$(asan_runtime)
    say "building the extension"
    rm -rf "$out/lib" "$out/temp"
    CC=$compiler LDSHARED="$compiler -shared" AIO_KV_SANITIZE=$sanitizers .venv/bin/python setup.py -q build \
        --build-lib "$out/lib" --build-temp "$out/temp" >"$out/build.log" 2>&1 || { cat "$out/build.log" >&2; exit 1; }
    say "${#tests[@]} Python test files"
    # PYTHONSAFEPATH keeps the working tree's package, with its normal extension, out of the way of the one just built.
    # pytest's own segfault handler is left to the sanitizer.
    LD_PRELOAD=$preload ASAN_OPTIONS=detect_leaks=0:exitcode=99 PYTHONSAFEPATH=1 PYTHONPATH=$out/lib PYTHONMALLOC=malloc \
        .venv/bin/python -m pytest -q -p no:cacheprovider -p no:faulthandler -m "not model and not gpu" -k "$python_selection" "${tests[@]}"
}

scripts/setup.sh dev
find_compiler
say "using $("$compiler" --version | head -n 1)${runner:+, without address randomisation}"
run_c_tests
[ "$kind" = thread ] || run_python_tests

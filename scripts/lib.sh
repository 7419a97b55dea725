# shellcheck shell=bash
# Sourced by the scripts beside it. Goes to the repository's root and sees to it that .venv holds
# the project and its tools. Does nothing when neither pyproject.toml nor constraints.txt changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() { # prints the name of a Python that is new enough
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$name"
            return
        fi
    done
    echo "Python 3.11 or newer is needed; python3 is $(python3 -V 2>/dev/null || echo absent)." >&2
    return 1
}

make_venv() { # makes a virtual environment in this folder
    local python root=()
    python="$(find_python)"
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        if [[ "$(id -u)" != 0 ]]; then root=(sudo -n); fi
        echo "installing $python-venv" >&2
        if ! { "${root[@]}" apt-get update -qq && "${root[@]}" apt-get install -y -qq "$python-venv"; } >&2; then
            echo "$python can't make environments. Please run: apt-get install $python-venv" >&2
            return 1
        fi
    fi
    "$python" -m venv "$1"
}

# install FOLDER CONSTRAINTS PACKAGES: makes the environment and installs, unless that was done.
install() {
    local folder="$1" constraints="$2" stamp
    stamp="$folder/installed-$(cat pyproject.toml "$constraints" | sha256sum | cut -c1-16)"
    if [[ -e "$stamp" ]]; then return; fi
    if [[ ! -x "$folder/bin/pip" ]]; then make_venv "$folder"; fi
    echo "installing into $folder; the first time takes a few minutes" >&2
    "$folder/bin/python" -m pip --disable-pip-version-check install --quiet \
        --constraint "$constraints" "${@:3}" >&2
    rm -f "$folder"/installed-*
    touch "$stamp"
}

install .venv constraints.txt --editable '.[dev]'

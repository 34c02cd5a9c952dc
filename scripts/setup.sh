#!/usr/bin/env bash
# Make or reuse .venv and install mmtrain into it, with the tested versions. The argument names extras:
#   scripts/setup.sh             what a run needs
#   scripts/setup.sh demo,test   the handwriting of the demo, and what the tests need
# A second call installs nothing unless pyproject.toml, constraints.txt or this file changed. PYTHON=... chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=${1:-}

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

if ! new_enough .venv/bin/python; then
    candidates=${PYTHON:-python3 python3.12 python3.11 python3.13}
    chosen=""
    for candidate in $candidates; do
        if new_enough "$candidate"; then
            chosen=$candidate
            break
        fi
    done
    if [[ -z $chosen ]]; then
        echo "scripts/setup.sh: needs Python 3.11 or newer; found none of: $candidates." >&2
        echo "Install one, or name it: PYTHON=/path/to/python3.12 scripts/setup.sh" >&2
        exit 2
    fi
    rm -rf .venv
    "$chosen" -m venv .venv
fi

stamp=.venv/installed-${extras:-run}
wanted=$(cksum pyproject.toml constraints.txt scripts/setup.sh; pwd)
if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
    echo "installing into .venv (the first time a few minutes: torch alone is 3 GB)" >&2
    # compat: without it `python -m mmtrain` in a folder that holds one called mmtrain, as the parent of a clone does,
    # imports that empty folder
    .venv/bin/python -m pip install --disable-pip-version-check --config-settings editable_mode=compat \
        -e ".${extras:+[$extras]}" -c constraints.txt >&2
    echo "$wanted" >"$stamp"
fi

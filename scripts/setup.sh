#!/usr/bin/env bash
# Make or reuse .venv and install mmtrain into it, with the tested versions. The first argument names extras:
#   scripts/setup.sh                    what a run needs
#   scripts/setup.sh demo,test          the handwriting of the demo, and what the tests need
#   scripts/setup.sh demo,test oldest   the same in .venv-oldest, with Python 3.12 and the oldest torch and transformers
# A second call installs nothing unless pyproject.toml, constraints.txt or this file changed. PYTHON=... chooses the interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=${1:-}
venv=.venv
constraints=constraints.txt
needed="3.11 or newer"
fits() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
candidates=${PYTHON:-python3 python3.12 python3.11 python3.13}

if [[ ${2:-} == oldest ]]; then
    venv=.venv-oldest
    constraints=$venv/constraints.txt
    needed=3.12
    fits() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; }
fi

if ! fits "$venv/bin/python"; then
    chosen=""
    for candidate in $candidates; do
        if fits "$candidate"; then
            chosen=$candidate
            break
        fi
    done
    if [[ -z $chosen ]]; then
        echo "scripts/setup.sh: needs Python $needed; found none of: $candidates." >&2
        echo "Install one, or name it: PYTHON=/path/to/python3.12 scripts/setup.sh" >&2
        exit 2
    fi
    rm -rf "$venv"
    "$chosen" -m venv "$venv"
fi

if [[ $venv == .venv-oldest ]]; then
    # huggingface_hub: the one that this transformers needs
    grep -vE '^(torch|torchvision|transformers|huggingface_hub)==' constraints.txt >"$constraints"
    printf '%s\n' 'torch==2.11.*' 'torchvision==0.26.*' 'transformers==5.17.*' >>"$constraints"
fi

stamp=$venv/installed-${extras:-run}
wanted=$(cksum pyproject.toml "$constraints" scripts/setup.sh; pwd)
if [[ ! -f $stamp || $(<"$stamp") != "$wanted" ]]; then
    echo "installing into $venv (the first time a few minutes: torch alone is 3 GB)" >&2
    # compat: without it `python -m mmtrain` in a folder that holds one called mmtrain, as the parent of a clone does,
    # imports that empty folder
    "$venv/bin/python" -m pip install --disable-pip-version-check --config-settings editable_mode=compat \
        -e ".${extras:+[$extras]}" -c "$constraints" >&2
    echo "$wanted" >"$stamp"
fi

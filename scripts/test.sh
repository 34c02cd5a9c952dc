#!/usr/bin/env bash
# Make or reuse .venv with the test extras, run the whole suite. Arguments go to pytest: scripts/test.sh -k launch -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null # nothing here may wait for an answer

scripts/setup.sh demo,test
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # tests start several processes, each of which would use every core
.venv/bin/python -m pytest "$@"

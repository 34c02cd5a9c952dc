#!/usr/bin/env bash
# Make or reuse .venv with the test extras, run the test suite on all cores (at most 4). What follows goes to pytest.
#   scripts/test.sh                   all that a change must pass
#   scripts/test.sh --fast            plan, data, model logic, configuration, parity at pipeline 1 and 2
#   scripts/test.sh --nightly         everything, exhaustive sweeps and benchmarks included
#   scripts/test.sh --nightly-turn 2  one part of the nightly tests alone, as .ci/run does by turns
#   scripts/test.sh --oldest          --fast with Python 3.12, torch 2.11 and transformers 5.17, in .venv-oldest
#   scripts/test.sh -k launch -x
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null # nothing here may wait for an answer

venv=.venv
versions=tested
tier=(-m "not nightly")
fast=(-m "not nightly and not slow" tests/base tests/config tests/layouts tests/facts tests/model tests/plan tests/data
    tests/test_parity.py tests/test_import_order.py)
case ${1:-} in
--fast)
    tier=("${fast[@]}")
    shift
    ;;
--nightly)
    tier=()
    shift
    ;;
--nightly-turn)
    tier=(-m nightly) # the option itself goes to pytest
    ;;
--oldest)
    venv=.venv-oldest
    versions=oldest
    tier=("${fast[@]}")
    shift
    ;;
esac

scripts/setup.sh demo,test "$versions"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # tests start several processes, each of which would use every core
unset PYTHONDONTWRITEBYTECODE # else each of the many processes that tests start would compile mmtrain anew
export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}" # runs of several threads: those that spin keep others from busy cores
cores=$("$venv/bin/python" -c 'import os; print(min(4, len(os.sched_getaffinity(0))))')
"$venv/bin/python" -m pytest -n "$cores" "${tier[@]}" "$@"

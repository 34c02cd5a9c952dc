#!/usr/bin/env bash
# From a fresh clone: make .venv, install, make a tiny random model with data, train its projector on four pipeline
# ranks on the CPU. A second call installs nothing and runs again. Arguments are passed to the launcher: key=value.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null

scripts/setup.sh
[[ -f runs/tiny/config.yaml ]] || .venv/bin/python tools/make_tiny_model.py runs/tiny
.venv/bin/python -m mmtrain.launch runs/tiny/config.yaml run.name=quickstart run.overwrite=true "$@"
echo "results: runs/quickstart (metrics.jsonl, audit.json, plan.json, log.txt, checkpoints/)"

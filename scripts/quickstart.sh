#!/usr/bin/env bash
# From a fresh clone: make .venv, install, run the main job (configs/llava_pp4.yaml: minutes on a CPU), say where the
# results are. A second call installs nothing and trains again. Arguments are passed to the launcher: key=value.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec </dev/null

scripts/setup.sh demo
.venv/bin/python -m mmtrain train configs/llava_pp4.yaml run.overwrite=true "$@"

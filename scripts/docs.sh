#!/usr/bin/env bash
# Make the documentation's generated pages and build the site into mmtrain/docs/site; a broken link fails.
#   scripts/docs.sh          build
#   scripts/docs.sh serve    build, and serve it while you write
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

scripts/setup.sh docs
COLUMNS=100 .venv/bin/python scripts/reference_pages.py
cd mmtrain/docs
case ${1:-build} in
build) ../../.venv/bin/zensical build --strict --clean ;;
*) ../../.venv/bin/zensical "$@" ;;
esac

#!/usr/bin/env bash
# Usage: bash tests/benchmarks/run.sh --json FILE [--only NAME]
set -euo pipefail
cd "$(dirname "$0")/../.."
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 NUMBA_NUM_THREADS=1
export PYTHONPATH=tests/support${PYTHONPATH:+:$PYTHONPATH}
exec python tests/benchmarks/run.py "$@"

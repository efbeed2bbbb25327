#!/usr/bin/env bash
# Sets up what the tests need and runs all of them. Arguments go to pytest; with one that
# starts with tests/, only what it names is run.
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/install_cpu.sh
echo "[1/3] environment ($VENV)"
install_cpu
bash grafana/get_prometheus.sh || echo "no Prometheus: the tests that need it are skipped"
echo "[2/3] lint and types"
ruff check .
ruff format --check .
mypy
echo "[3/3] tests"
case " $*" in *" tests/"*) exec pytest "$@" ;; esac
# Tests of speculation need another environment before anything is imported. They run beside
# the others, on one core each: threads that wait for each other lose minutes on busy cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
log=$(mktemp)
bash tests/speculation/run.sh -m "not sweep" "$@" >"$log" 2>&1 &
speculation=$!
trap 'kill "$speculation" 2>/dev/null || true; rm -f "$log"' EXIT
status=0
pytest "$@" || status=$?
echo "tests of speculation:"
wait "$speculation" || status=$?
cat "$log"
exit "$status"

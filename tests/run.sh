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
pytest "$@"
# These need another environment, before anything is imported.
case " $*" in *" tests/"*) ;; *) bash tests/speculation/run.sh -m "not sweep" "$@" ;; esac

#!/usr/bin/env bash
# Compiles every kernel for every chip with another version of triton, and, from 3.8 on,
# compares interpreted kernels with the reference:
# bash tests/kernels/with_triton.sh VERSION FOLDER   (an empty folder, or one from an earlier run)
set -euo pipefail
cd "$(dirname "$0")/../.."
version=${1:?give a version of triton} folder=$(realpath -m "${2:?give a folder for it}")
source "${VENV:-.venv}/bin/activate"
if [ ! -d "$folder/triton" ]; then
    pip install --quiet --no-deps --target "$folder" "triton==$version"
fi
export PYTHONPATH="$folder" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
found=$(python -c "import triton; print(triton.__version__)")
[ "$found" = "$version" ] || { echo "$folder holds triton $found" >&2; exit 1; }
python tests/kernels/compile_ahead.py
# The interpreter of 3.6 fails with numpy 2.4 and later.
case $version in
    3.[0-7].*) echo "triton $version: compiled only" ;;
    *) pytest -q tests/kernels/test_interpreted.py ;;
esac

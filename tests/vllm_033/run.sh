#!/usr/bin/env bash
# Runs the tests of the CUDA integration with vLLM 0.33's own Python code, without a GPU:
# bash tests/vllm_033/run.sh FOLDER   (an empty folder, or one from an earlier run)
# With --record it first writes 0.33's signatures to tests/data/seams.json.
set -euo pipefail
cd "$(dirname "$0")/../.."
folder=$(realpath -m "${1:?give a folder for the unpacked wheel}")
source "${VENV:-.venv}/bin/activate"
python tests/vllm_033/unpack.py "$folder"
if [ "${2:-}" = --record ]; then python tests/support/seams.py "$folder"; fi
export PYTHONPATH="$folder" VLLM_DHISPARSE_ALLOW_UNTESTED=1 VLLM_033="$folder"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
pytest -q tests/integration/test_kv_groups.py tests/integration/test_kv_spec.py \
    tests/integration/test_seams.py tests/integration/test_cuda_path.py \
    tests/integration/test_cuda_in_place.py tests/integration/test_cuda_refusals.py \
    tests/integration/test_manager.py tests/integration/test_block_source.py \
    tests/integration/test_draft_lengths.py tests/integration/test_verification_price.py

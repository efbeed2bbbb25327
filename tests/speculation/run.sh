#!/usr/bin/env bash
# Tests of vLLM's speculators on vLLM's V2 runner, for which Triton's interpreter must be set up
# before anything imports torch. Arguments go to pytest; `-m sweep` runs the large matrix.
set -euo pipefail
cd "$(dirname "$0")/../.."
export DHISPARSE_TRITON_INTERPRETER=1 TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1
[ $# -gt 0 ] || set -- -m "not sweep"
exec python -m pytest -o testpaths=tests/speculation "$@"

#!/usr/bin/env bash
# Every residency under the same load, with `vllm bench sweep`.
#
#   bash examples/bench/sweep.sh [options of vllm bench sweep serve]
#
# Settings, all from the environment; the defaults fit a tiny model on a machine without a GPU:
#   MODEL           model to serve; default: a tiny one, made here
#   LOAD            load_step (default), concurrency, or a file of bench parameters
#   RESIDENCIES     file of serve parameters, default examples/bench/residencies.json
#   INPUT_TOKENS    tokens of a prompt, default 2000
#   OUTPUT_TOKENS   tokens of an answer, default 128
#   PORT            default 8000
#   SERVE_OPTIONS   more options of vllm serve
#
# On a GPU machine, for example:
#   MODEL=zai-org/GLM-5.3 INPUT_TOKENS=100000 OUTPUT_TOKENS=1000 \
#       SERVE_OPTIONS="--tensor-parallel-size 8" bash examples/bench/sweep.sh
#
# Results: .cache/bench/NAME/, one folder for each pair, and summary.csv.
set -euo pipefail
case ${1-} in -h | --help) sed -n '2,21s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
here=examples/bench port=${PORT:-8000} input=${INPUT_TOKENS:-2000} output=${OUTPUT_TOKENS:-128}
load=$(realpath -m "${LOAD:-load_step}") residencies=${RESIDENCIES:+$(realpath -m "$RESIDENCIES")}
cd "$(dirname "$0")/../.."
[ -f "$load" ] || load=$here/${LOAD:-load_step}.json
[ -f "$load" ] || { echo "error: no file $load; see --help" >&2; exit 2; }
python -c 'import pandas' 2>/dev/null || {
    echo "error: vllm bench sweep needs pandas: pip install pandas" >&2
    exit 2
}

serve_options=${SERVE_OPTIONS-}
if [ -z "${MODEL-}" ]; then
    MODEL=.cache/bench/model
    python examples/make_tiny_dsa.py "$MODEL" --layers 8 --leaders 2
    # A third of what sixteen requests have, so that memory is short under high load, and small
    # steps, since memory for one of them is kept plain.
    serve_options="--dtype float32 --kv-cache-memory-bytes 80M --max-num-seqs 16 \
        --max-num-batched-tokens 512 $serve_options"
    export HF_HUB_OFFLINE=1
    unset VLLM_CPU_KVCACHE_SPACE # vLLM prefers it to --kv-cache-memory-bytes
fi
export PROMETHEUS_DISABLE_CREATED_SERIES=true

vllm bench sweep serve \
    --serve-cmd "vllm serve $MODEL --served-model-name dsa --host 127.0.0.1 --port $port \
        --attention-backend DHISPARSE --max-model-len $((input + output + 64)) $serve_options" \
    --serve-params "${residencies:-$here/residencies.json}" \
    --bench-cmd "python $here/bench.py --model dsa --tokenizer $MODEL --host 127.0.0.1 --port $port \
        --dataset-name random --random-input-len $input --random-output-len $output \
        --ignore-eos --seed 0 --disable-tqdm" \
    --bench-params "$load" \
    --output-dir .cache/bench --num-runs 1 "$@"

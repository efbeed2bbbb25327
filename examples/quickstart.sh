#!/usr/bin/env bash
# From nothing to a served DSA model with DHISPARSE on a machine without a GPU.
#
#   bash examples/quickstart.sh [--residency adaptive|fixed|resident] [--port N]
#                               [--requests N] [--json FILE] [--speculate dspark|dflash2]
#
# Makes a virtual environment ($VENV, default .venv), starts `vllm serve` with the trained
# tiny model of examples/tiny_dsa and device memory for about half of its requests' history,
# asks at once for numbers that stand far back in long prompts, prints how many answers were
# right, speed and metrics. With --speculate the trained drafter proposes 7 tokens a step, in
# Triton's interpreter: exact, and slower than without.
set -euo pipefail
usage() { sed -n '2,11s/^# \{0,1\}//p' "$0"; }
option() { # name value
    [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; exit 2; }
    echo "$2"
}

port= requests=8 json= residency=adaptive speculate=
while [ $# -gt 0 ]; do
    case $1 in
    --residency) residency=$(option "$@") ;;
    --port) port=$(option "$@") ;;
    --requests) requests=$(option "$@") ;;
    --json) json=$(realpath -m "$(option "$@")") ;;
    --speculate) speculate=$(option "$@") ;;
    -h | --help) usage; exit 0 ;;
    *) echo "error: unknown option $1" >&2; usage >&2; exit 2 ;;
    esac
    shift 2
done
case $residency in adaptive | fixed | resident) ;; *)
    echo "error: --residency must be adaptive, fixed or resident" >&2
    exit 2
    ;;
esac
case $speculate in '' | dspark | dflash2) ;; *)
    echo "error: --speculate must be dspark or dflash2" >&2
    exit 2
    ;;
esac
case $requests in '' | *[!0-9]* | 0*) echo "error: --requests needs a positive number" >&2; exit 2 ;; esac

cd "$(dirname "$0")/.."
work=.cache/quickstart
mkdir -p "$work"
source examples/install_cpu.sh

server=
stop_server() {
    [ -n "$server" ] || return 0
    trap '' PIPE # whoever read the output may be gone
    echo "stopping the server" || true
    kill -INT -- "-$server" 2>/dev/null || true
    for _ in $(seq 100); do
        kill -0 -- "-$server" 2>/dev/null || break
        sleep 0.2
    done
    kill -KILL -- "-$server" 2>/dev/null || true
    server=
}
trap stop_server EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

echo "[1/3] environment ($VENV; the first time downloads about 1 GB)"
install_cpu

checkpoints=examples/tiny_dsa/checkpoints
drafts=()
if [ -n "$speculate" ]; then
    # DFlash2 is a kind of dflash to vLLM.
    drafts=(--speculative-config "{\"method\": \"${speculate%2}\", \"model\": \"$checkpoints/$speculate\", \"num_speculative_tokens\": 7}")
fi
# Beside the indexer's keys about half of the requests' rows, so that rows are fetched; small
# steps, since under adaptive memory for one of them is kept plain.
pool=$((12 + 11 * requests))

port=$(python examples/quickstart.py port $port)
echo "[2/3] vllm serve --attention-backend DHISPARSE on port $port (log: $work/server.log)"
export HF_HUB_OFFLINE=1 PROMETHEUS_DISABLE_CREATED_SERIES=true
unset VLLM_CPU_KVCACHE_SPACE # vLLM prefers it to --kv-cache-memory-bytes
# A process group of its own, so that the server and all its children can be stopped.
setsid vllm serve "$checkpoints/target" --served-model-name tiny-dsa --port "$port" --host 127.0.0.1 \
    --attention-backend DHISPARSE --additional-config "{\"dhisparse\": {\"residency\": \"$residency\"}}" \
    --dtype float32 --max-model-len 4608 --max-num-seqs 16 --max-num-batched-tokens 512 \
    --kv-cache-memory-bytes "${pool}M" "${drafts[@]}" \
    >"$work/server.log" 2>&1 &
server=$!
python examples/quickstart.py wait "$port" "$server" || {
    tail -n 30 "$work/server.log" >&2
    exit 1
}

echo "[3/3] $requests concurrent requests with long prompts"
python examples/quickstart.py ask "$port" "$requests" ${json:+"$json"}

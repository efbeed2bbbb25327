#!/usr/bin/env bash
# From nothing to a served DSA model with DHISPARSE on a machine without a GPU.
#
#   bash examples/quickstart.sh [--residency adaptive|fixed|resident] [--port N]
#                               [--requests N] [--json FILE] [--speculate dspark|dflash2]
#
# Makes a virtual environment ($VENV, default .venv), builds a tiny model, starts
# `vllm serve` with a device pool about half as large as the history of its requests,
# sends concurrent long prompts, prints answers, speed and metrics. With --speculate a tiny
# drafter proposes 4 tokens a step, in Triton's interpreter: exact, and slower than without.
set -euo pipefail
usage() { sed -n '2,10s/^# \{0,1\}//p' "$0"; }
option() { # name value
    [ $# -ge 2 ] || { echo "error: $1 needs a value" >&2; exit 2; }
    echo "$2"
}

port= requests=8 json= residency=fixed speculate=
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
    echo "stopping the server"
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

echo "[1/4] environment ($VENV; the first time downloads about 1 GB)"
install_cpu

drafts=()
if [ -z "$speculate" ]; then
    echo "[2/4] tiny GLM-5.x-shaped model"
    python examples/make_tiny_dsa.py "$work/model"
else
    echo "[2/4] tiny GLM-5.x-shaped model and a drafter for it ($speculate)"
    python examples/make_tiny_dsa.py "$work/model" --context-gain 2.5
    python examples/make_tiny_drafter.py "$work/model" "$work/drafter" --method "$speculate"
    # DFlash2 is a kind of dflash to vLLM.
    drafts=(--speculative-config "{\"method\": \"${speculate%2}\", \"model\": \"$work/drafter\", \"num_speculative_tokens\": 4}")
fi

port=$(python examples/quickstart.py port $port)
echo "[3/4] vllm serve --attention-backend DHISPARSE on port $port (log: $work/server.log)"
export HF_HUB_OFFLINE=1 PROMETHEUS_DISABLE_CREATED_SERIES=true
unset VLLM_CPU_KVCACHE_SPACE # vLLM prefers it to --kv-cache-memory-bytes
# A process group of its own, so that the server and all its children can be stopped.
setsid vllm serve "$work/model" --served-model-name tiny-dsa --port "$port" --host 127.0.0.1 \
    --attention-backend DHISPARSE --additional-config "{\"dhisparse\": {\"residency\": \"$residency\"}}" \
    --dtype float32 --max-model-len 8192 --max-num-seqs 16 --kv-cache-memory-bytes 96M "${drafts[@]}" \
    >"$work/server.log" 2>&1 &
server=$!
python examples/quickstart.py wait "$port" "$server" || {
    tail -n 30 "$work/server.log" >&2
    exit 1
}

echo "[4/4] $requests concurrent requests with long prompts"
python examples/quickstart.py ask "$port" "$requests" ${json:+"$json"}

"""A real `vllm serve` with DHISPARSE, and its HTTP interface."""

import json
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from quickstart import choose_port

READY_SECONDS = 300


def series_name(name: str, labels: dict[str, str]) -> str:
    """``name{values}`` without the labels that vLLM gives every metric."""
    own = {k: labels[k] for k in sorted(labels) if k not in ("engine", "model_name")}
    return f"{name}{{{','.join(own.values())}}}"


class Server:
    """One running server."""

    def __init__(self, port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.port = port
        self.process = process
        self.log = log

    def get(self, path: str) -> str:
        """The text of one GET."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as reply:
            return str(reply.read().decode())

    def post(self, path: str, **body: Any) -> Any:
        """The JSON answer of one POST."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            json.dumps({"model": "tiny"} | body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as reply:
            return json.load(reply)

    def metrics(self, engine: str | None = None) -> dict[str, float]:
        """Sums over engines, or of one, by ``name{values in the order of label names}``."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                if engine not in (None, sample.labels.get("engine")):
                    continue
                labels = {
                    k: v for k, v in sample.labels.items() if k not in ("engine", "model_name")
                }
                key = f"{sample.name}{{{','.join(labels.values())}}}"
                found[key] = found.get(key, 0) + sample.value
        return found


@contextmanager
def serving(model: Path, folder: Path, *options: str, **variables: str) -> Iterator[Server]:
    """A server of ``model``; its log and nothing else goes to ``folder``.

    Args:
        model: folder.
        folder: for the log.
        options: of vLLM.
        variables: of the environment.
    """
    port, log = choose_port(), folder / "server.log"
    command = ["vllm", "serve", str(model), "--served-model-name", "tiny", "--port", str(port)]
    command += ["--host", "127.0.0.1", "--attention-backend", "DHISPARSE", "--dtype", "float32"]
    command += ["--max-model-len", "4096", "--max-num-seqs", "16", *options]
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "INFO"} | variables
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    if "--kv-cache-memory-bytes" in options:  # vLLM prefers the variable
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, env=environment, start_new_session=True
        )
    server = Server(port, process, log)
    try:
        _wait(server)
        yield server
        process.send_signal(signal.SIGINT)
        process.wait(60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _wait(server: Server) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and server.process.poll() is None:
        try:
            server.get("/health")
            return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError("no server:\n" + server.log.read_text()[-4000:])

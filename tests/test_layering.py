"""Imports go one way: integration -> runtime -> core."""

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "vllm_dhisparse"
ABSENT = {
    "core": ["torch", "vllm", "triton", "numba", "cupy"],
    "runtime": ["vllm", "triton", "cupy"],
    "simulator": ["torch", "vllm", "triton", "cupy", "vllm_dhisparse.runtime"],
    "config": ["torch", "vllm", "numpy"],
    "metrics": ["torch", "vllm", "numpy"],
    "doctor": ["torch", "vllm", "numpy", "numba", "triton", "cupy"],
    "cli": ["torch", "vllm", "numba", "triton", "cupy"],
}


def modules(part):
    if (PACKAGE / f"{part}.py").exists():
        return [f"vllm_dhisparse.{part}"]
    files = sorted((PACKAGE / part).rglob("*.py"))
    names = [".".join(f.relative_to(PACKAGE.parent).with_suffix("").parts) for f in files]
    return [name.removesuffix(".__init__") for name in names]


@pytest.mark.parametrize("part", ABSENT)
def test_a_part_imports_without_what_it_may_not_use(part):
    program = "\n".join(
        [
            "import importlib, sys",
            f"sys.modules.update(dict.fromkeys({ABSENT[part]}))",
            f"for name in {modules(part)}: importlib.import_module(name)",
            "assert not any(n.startswith('vllm_dhisparse.integration') for n in sys.modules)",
        ]
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_kernel_folder_refuses_its_own_name():
    root = str(PACKAGE.parent)
    program = f"import sys; sys.path.insert(0, {root!r}); import triton_kernels"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "installed as vllm_dhisparse.kernels" in done.stderr


def test_the_kernel_folder_is_not_on_the_path_of_the_tests():
    assert str(PACKAGE.parent) not in sys.path
    with pytest.raises(ImportError):
        __import__("triton_kernels")

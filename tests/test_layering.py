"""Imports go one way: integration -> runtime -> core."""

import ast
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
    files = [file for file in files if file.parent.name != "triton"]  # ops imports it on a GPU
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


def test_kernels_import_triton_only():
    """And the part of runtime that launches them: no vLLM, no driver of a device."""
    program = "\n".join(
        [
            "import sys",
            "sys.modules.update(dict.fromkeys(['vllm', 'cupy', 'numba']))",
            "import vllm_dhisparse.runtime.triton",
        ]
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    for file in (PACKAGE.parent / "triton_kernels").glob("*.py"):
        imported = {
            name.split(".")[0] if not name.startswith("vllm_dhisparse") else name
            for node in ast.walk(ast.parse(file.read_text()))
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        foreign = {name for name in imported if not name.startswith("vllm_dhisparse.kernels")}
        assert foreign <= {"triton"}, file.name


def test_the_kernel_folder_refuses_its_own_name():
    root = str(PACKAGE.parent)
    program = f"import sys; sys.path.insert(0, {root!r}); import triton_kernels"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "installed as vllm_dhisparse.kernels" in done.stderr


def test_the_kernel_folder_is_not_on_the_path_of_the_tests():
    assert str(PACKAGE.parent) not in sys.path
    with pytest.raises(ImportError):
        __import__("triton_kernels")

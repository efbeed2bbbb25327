"""The package from a checkout, without vLLM and without an installation."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def use_checkout() -> None:
    """Make the package importable where it is not installed, and the tests' helpers."""
    sys.path[:0] = [str(ROOT / "tests/support"), str(ROOT / "tests/kernels")]
    if importlib.util.find_spec("vllm_dhisparse") is None:
        sys.path.append(str(ROOT))
    if importlib.util.find_spec("vllm_dhisparse.kernels") is None:
        folder = ROOT / "triton_kernels"
        name = "vllm_dhisparse.kernels"
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)

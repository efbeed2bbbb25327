"""Which compiled packages can be imported; a program, so that a failure ends only itself.

Prints one JSON object: for each package its version or the error of its import, and what
torch says of CUDA.
"""

import json
from importlib import import_module
from importlib.util import find_spec

PACKAGES = ("torch", "numba", "torchvision", "torchaudio", "torchcodec")


def imports() -> dict[str, dict[str, str | None]]:
    """Import each installed package, torch first; a package that is absent is left out."""
    found: dict[str, dict[str, str | None]] = {}
    for name in PACKAGES:
        if find_spec(name) is None:
            continue
        try:
            module = import_module(name)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}".partition("\n")[0]}
            continue
        found[name] = {"version": str(getattr(module, "__version__", "unknown"))}
        if name == "torch":
            found[name]["cuda"] = module.version.cuda
    return found


if __name__ == "__main__":
    print(json.dumps(imports()))

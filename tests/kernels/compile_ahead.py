"""Compiles every kernel that the product launches for chips that are not here.

    python tests/kernels/compile_ahead.py [--targets sm_90 ...]

For each chip: no spills, shared memory within its limit, 16-byte loads in the kernels that
copy rows. gfx942 is compiled only. ``with_triton.sh`` does it with another version of triton.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

SHARED_LIMITS = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448}
TARGETS = [*SHARED_LIMITS, "gfx942"]
WIDE_ACCESSES = 4  # of a thread; where they are by the word, only a stray one is wide
WIDE_LOAD = re.compile(r"ld\.global(\.\w+)*\.v4\.[bu]32")
WIDE_STORE = re.compile(r"st\.global(\.\w+)*\.v4\.[bu]32")


def compile_all(targets: list[str]) -> list[dict[str, object]]:
    """One entry for each kernel variant and target."""
    sys.path.append(str(Path(__file__).parents[1] / "support"))
    from launches import shipped_launches

    return [
        {"kernel": launch.name, "target": target, **compile_one(launch, target)}
        for launch in shipped_launches()
        for target in targets
    ]


def compile_one(launch, target: str) -> dict[str, object]:
    """Registers, spills in bytes, shared memory, and what is wrong."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    is_cuda = target.startswith("sm_")
    chip = GPUTarget("cuda", int(target[3:]), 32) if is_cuda else GPUTarget("hip", target, 64)
    constants = dict(launch.constants)
    if not is_cuda:  # the one thing that the host chooses by the maker of its chip
        constants = {i: "amd" if value == "nvidia" else value for i, value in constants.items()}
    source = ASTSource(
        fn=launch.kernel,
        signature=dict(launch.signature),
        constexprs={(index,): value for index, value in constants.items()},
        attrs={(index,): [["tt.divisibility", 16]] for index in launch.aligned},
    )
    try:
        compiled = triton.compile(source, target=chip, options=dict(launch.options))
    except Exception as error:
        return {"wrong": [f"{type(error).__name__}: {str(error)[-300:]}"]}
    shared = compiled.metadata.shared
    if not is_cuda:
        return {"shared": shared, "wrong": []}
    registers, stack = resources(compiled.asm["cubin"])
    wrong = []
    if stack:
        wrong.append(f"spills {stack} bytes")
    if shared > SHARED_LIMITS[target]:
        wrong.append(f"wants {shared} bytes of shared memory")
    accesses = [len(kind.findall(compiled.asm["ptx"])) for kind in (WIDE_LOAD, WIDE_STORE)]
    if launch.is_copy and min(accesses) < WIDE_ACCESSES:
        wrong.append(f"reads and writes 16 bytes only {accesses} times")
    return {"registers": registers, "stack": stack, "shared": shared, "wrong": wrong}


def resources(cubin: bytes) -> tuple[int, int]:
    """Return registers and bytes of stack; what a kernel spills lies on its stack."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    assert found is not None, done.stdout
    return int(found[1]), int(found[2])


def compile_apart(targets: list[str]) -> list[dict[str, object]]:
    """Compile in another process, which does not interpret and has a cache of its own."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        environment = inherited | {
            "TRITON_CACHE_DIR": cache,
            "TRITON_DEFAULT_FP_FUSION": "1",  # what releases before 3.10 do, and say aloud
        }
        done = subprocess.run(
            [sys.executable, __file__, "--json", "--targets", *targets],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", nargs="*", default=TARGETS, choices=TARGETS)
    parser.add_argument("--json", action="store_true", help="compile in this process")
    options = parser.parse_args()
    if options.json:
        import triton

        results = compile_all(options.targets)
        print(json.dumps([{"triton": triton.__version__, **result} for result in results]))
        return 0
    wrong = 0
    for result in compile_apart(options.targets):
        figures = " ".join(
            f"{name}={result[name]}" for name in ("registers", "stack", "shared") if name in result
        )
        state = "; ".join(result["wrong"]) or "ok"
        wrong += bool(result["wrong"])
        print(f"{result['triton']} {result['target']:7} {state:4} {figures} {result['kernel']}")
    print(f"{wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

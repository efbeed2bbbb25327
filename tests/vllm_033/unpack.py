"""Unpack the Python files of vLLM 0.33's CUDA wheel, to run its planning code without a GPU.

    python tests/vllm_033/unpack.py FOLDER

Says how large the wheel is before it downloads it, and wants three times that on the disk.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from pathlib import Path

REQUIREMENT = "vllm==0.33.*"
WHEEL = ["--no-deps", "--only-binary=:all:", "--platform=manylinux_2_28_x86_64"]


def wheel_bytes(folder):
    """Return the size of the wheel that pip would download."""
    report = Path(folder) / "report.json"
    plan = ["install", "--dry-run", "--ignore-installed", "--quiet", f"--report={report}"]
    pip([*plan, f"--target={folder}/nothing", *WHEEL, REQUIREMENT])
    (found,) = json.loads(report.read_text())["install"]
    url = found["download_info"]["url"]
    if url.startswith("file://"):
        return Path(url.removeprefix("file://")).stat().st_size
    request = urllib.request.Request(url, method="HEAD")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(answer.headers["Content-Length"])


def pip(arguments):
    """Run pip of this environment."""
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)


def main(arguments):
    """Download and unpack, unless it is there."""
    (target,) = map(Path, arguments)
    if (target / "vllm/_version.py").exists():
        print(f"{target}/vllm is there already")
        return
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target) as folder:
        size = wheel_bytes(folder)
        print(f"the wheel of {REQUIREMENT} has {size / 2**20:.0f} MiB")
        free = shutil.disk_usage(target).free
        if free < 3 * size:
            sys.exit(f"only {free / 2**20:.0f} MiB are free in {target}; give another folder")
        pip(["download", "--quiet", "--dest", folder, *WHEEL, REQUIREMENT])
        (wheel,) = Path(folder).glob("vllm-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".py")]
            archive.extractall(target, names)
            operators = archive.read("vllm/_flashmla_C.abi3.so")
        (target / "flashmla_schemas.json").write_text(json.dumps(schemas(operators)))


def schemas(library):
    """Return the schemas of FlashMLA's sparse operators, as the library registers them."""
    found = []
    for name in (b"sparse_decode_fwd(", b"sparse_prefill_fwd("):
        start = library.index(name)
        found.append("_flashmla_C::" + library[start : library.index(b"\0", start)].decode())
    return found


if __name__ == "__main__":
    main(sys.argv[1:])

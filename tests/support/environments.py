"""Environments like the tests' own, made of links, with something broken."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

SITE = next(Path(p) for p in sys.path if p.endswith("site-packages"))


class Environment:
    """A virtual environment whose packages are links to those of the running one."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, with_pip=False, symlinks=True)
        self.bin = folder / "bin"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        self.site = folder / "lib" / version / "site-packages"
        for entry in SITE.iterdir():
            (self.site / entry.name).symlink_to(entry)
        (self.bin / "vllm").symlink_to(Path(sys.executable).parent / "vllm")

    def remove(self, pattern: str) -> None:
        """Take packages or their metadata away."""
        found = list(self.site.glob(pattern))
        assert found, pattern
        for entry in found:
            entry.unlink()

    def package(self, name: str, code: str) -> None:
        """Put a module of its own in the place of a package."""
        entry = self.site / name
        if entry.is_symlink():
            entry.unlink()
        entry.mkdir(exist_ok=True)
        (entry / "__init__.py").write_text(code)

    def unlink_children(self, name: str) -> Path:
        """Make a package a folder of links, so that files in it can be replaced."""
        entry = self.site / name
        entry.unlink()
        entry.mkdir()
        for child in (SITE / name).iterdir():
            if child.name != "__pycache__":
                (entry / child.name).symlink_to(child)
        return entry

    def distribution(self, name: str, version: str, *files: str) -> None:
        """Add a distribution's metadata, which names its files."""
        folder = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        if folder.is_symlink():
            folder.unlink()
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        (folder / "RECORD").write_text("".join(f"{file},,\n" for file in files))

    def doctor(self, *options: str, **settings: str):
        """Exit status, and the findings by check."""
        cleared = ("VLLM_PLUGINS", "PYTHONPATH", "VLLM_ENABLE_V1_MULTIPROCESSING")
        environment = {k: v for k, v in os.environ.items() if k not in cleared}
        environment["PATH"] = f"{self.bin}:{environment['PATH']}"
        done = subprocess.run(
            [self.bin / "python", "-P", "-m", "vllm_dhisparse", "doctor", "--json", *options],
            env=environment | settings,
            capture_output=True,
            text=True,
        )
        assert done.returncode in (0, 1), done.stderr
        checks = {each["check"]: each for each in json.loads(done.stdout)["checks"]}
        errors = {name for name, each in checks.items() if each["status"] == "error"}
        assert done.returncode == bool(errors)
        return errors, checks

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Wheel and source distribution, the wheel built from the source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    # Without isolation: no download, and the tools of this environment are the tested ones.
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def test_packages_name_every_folder_on_disk():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        ".".join(file.parent.relative_to(ROOT).parts)
        for file in (ROOT / "vllm_dhisparse").rglob("*.py")
    }
    assert set(settings["packages"]) == folders | {"vllm_dhisparse.kernels"}


def test_the_wheel_holds_the_package_and_nothing_else(built):
    names = zipfile.ZipFile(built[0]).namelist()
    assert {name.split("/")[0] for name in names} == {
        "vllm_dhisparse",
        "vllm_dhisparse-0.1.0.dist-info",
    }
    assert "vllm_dhisparse/kernels/__init__.py" in names
    assert "vllm_dhisparse/py.typed" in names
    assert "vllm_dhisparse/simulator/data/models.toml" in names
    assert "vllm_dhisparse/simulator/data/profiles/h200-pcie.toml" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.parametrize("kind", [0, 1], ids=["wheel", "sdist"])
def test_an_installed_copy_works_elsewhere(built, kind, tmp_path):
    target = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
    options = ["--no-build-isolation", "--target", str(target), str(built[kind])]
    subprocess.run([*install, *options], check=True)
    program = (
        "import importlib.metadata as m, vllm_dhisparse, vllm_dhisparse.kernels\n"
        f"assert vllm_dhisparse.__file__.startswith({str(target)!r})\n"
        "points = m.distribution('vllm-dhisparse').entry_points\n"
        "groups = {p.group: p.load() for p in points}\n"
        "plugins = {'vllm.general_plugins', 'vllm.platform_plugins'}\n"
        "assert set(groups) == plugins | {'console_scripts'}\n"
    )
    # -S hides the environment's own, editable copy.
    site = next(p for p in sys.path if p.endswith("site-packages"))
    program = f"import sys; sys.path[:0] = [{str(target)!r}, {site!r}]\n" + program
    subprocess.run([sys.executable, "-S", "-c", program], check=True, cwd=tmp_path)


def test_the_vllm_distributions_are_extras_only():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not any("vllm" in dependency for dependency in project["dependencies"])
    extras = {"vllm", "cpu", "cuda13", "cuda12", "notebooks", "dev"}
    assert set(project["optional-dependencies"]) == extras

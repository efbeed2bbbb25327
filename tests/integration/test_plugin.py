import os
import pickle
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_dhisparse.integration import plugin, unsupported
from vllm_dhisparse.integration.compat import unsupported_reason
from vllm_dhisparse.integration.cuda.backend import CudaBackend
from vllm_dhisparse.integration.unsupported import UnsupportedBackend


def test_registering_twice_changes_nothing():
    plugin.register()
    member = AttentionBackendEnum["DHISPARSE"]
    plugin.register()
    assert AttentionBackendEnum["DHISPARSE"] is member
    assert member.get_class().get_name() == "DHISPARSE"


def test_the_name_survives_a_process_that_has_loaded_no_plugin():
    plugin.register()
    text = pickle.dumps(AttentionBackendEnum["DHISPARSE"]).hex()
    program = f"import pickle; print(pickle.loads(bytes.fromhex({text!r})).name)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["DHISPARSE"], done.stderr


def test_pickling_in_one_process_gives_the_same_member():
    member = AttentionBackendEnum["DHISPARSE"]
    assert pickle.loads(pickle.dumps(member)) is member


def test_other_devices_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(unsupported, "current_platform", SimpleNamespace(device_type="xpu"))
    (reason,) = UnsupportedBackend.validate_configuration()
    assert reason == "DHISPARSE runs on vLLM's builds for CPU and CUDA; this one is for xpu."


@pytest.mark.parametrize(
    ("device", "version", "message"),
    [
        ("cpu", "0.32.1", None),
        ("cuda", "0.33.0", None),
        ("cuda", "0.32.0", r">=0.33 \(CUDA build\); found 0.32.0"),
        ("cpu", "0.33.0", r">=0.32 \(CPU build\); found 0.33.0"),
    ],
)
def test_each_device_has_its_own_versions(device, version, message):
    reason = unsupported_reason(version, device)
    assert (reason is None) if message is None else re.search(message, reason)


def test_on_cuda_the_backend_and_its_connector_are_known(monkeypatch):
    """With a stand-in for the part of vLLM's platform that needs a driver."""
    program = """
import sys, types, torch
from vllm import platforms
torch.cuda.get_device_capability = lambda *_: (9, 0)
sys.modules["vllm._C_stable_libtorch"] = types.ModuleType("stub")
sys.modules["vllm._C"] = types.ModuleType("stub")
platforms.cuda_platform_plugin = lambda: "found"
from vllm_dhisparse.integration import compat, plugin
compat.vllm = types.SimpleNamespace(__version__="0.33.0")
path = plugin.platform()
from vllm.utils.import_utils import resolve_obj_by_qualname
platforms._current_platform = platform = resolve_obj_by_qualname(path)()
assert platform.is_cuda() and type(platform).__name__ == "DHiSparseCudaPlatform"
plugin.register()
import pytest
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
assert "DHiSparseConnector" in KVConnectorFactory._registry
print(AttentionBackendEnum["DHISPARSE"].get_path())
"""
    environment = {**os.environ, "VLLM_PLUGINS": "none"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment
    )
    assert done.stdout.splitlines(), done.stderr
    assert resolve_obj_by_qualname(done.stdout.splitlines()[-1]) is CudaBackend

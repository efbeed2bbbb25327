import pickle
import subprocess
import sys
from types import SimpleNamespace

from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_dhisparse.integration import plugin, unsupported
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


def test_the_backend_refuses_cuda_with_a_reason(monkeypatch):
    monkeypatch.setattr(unsupported, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    assert "CUDA data plane is not released" in UnsupportedBackend.validate_configuration()[0]

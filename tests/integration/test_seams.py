"""What this package overrides and calls of vLLM, against both versions' recorded signatures.

``tests/support/seams.py`` records a version.
"""

import inspect
import json
import os
from pathlib import Path

import pytest
import seams
import vllm

from vllm_dhisparse.integration.attention import DHiSparseBackend, DHiSparseImpl
from vllm_dhisparse.integration.connector import DHiSparseConnector
from vllm_dhisparse.integration.cuda.address import _addressed_builder, _addressed_cache
from vllm_dhisparse.integration.cuda.backend import CudaBackend, CudaImpl
from vllm_dhisparse.integration.cuda.flash_mla import DECODE_SCHEMA, PREFILL_SCHEMA
from vllm_dhisparse.integration.cuda.hooks import CudaHooks
from vllm_dhisparse.integration.cuda.metadata import CudaMetadataBuilder
from vllm_dhisparse.integration.kv_spec import DHiSparseLatentSpec
from vllm_dhisparse.integration.manager import DHiSparseManager
from vllm_dhisparse.integration.messages import WorkerReport
from vllm_dhisparse.integration.metadata import DHiSparseMetadataBuilder
from vllm_dhisparse.integration.speculators import DraftSpeculator
from vllm_dhisparse.integration.verification import PricedVerification

RECORD = json.loads(seams.RECORD.read_text())
CPU, CUDA = "0.32.0", "0.33.0"


class Base:
    def build(self):
        pass


INDEXER = "v1/attention/backends/mla/indexer.py:DeepseekV32IndexerMetadataBuilder"
CACHE = "model_executor/models/deepseek_v2.py:DeepseekV32IndexerCache"
SPEC = "v1/kv_cache_interface.py:KVCacheSpec"
HMA = "distributed/kv_transfer/kv_connector/v1/base.py:SupportsHMA"
REPORT = "distributed/kv_transfer/kv_connector/v1/base.py:KVConnectorWorkerMetadata"
OVERRIDES = [
    (DHiSparseConnector, seams.CONNECTOR, (CPU, CUDA)),
    (DHiSparseConnector, HMA, (CPU, CUDA)),
    (WorkerReport, REPORT, (CPU, CUDA)),
    (DHiSparseManager, seams.MANAGER, (CPU, CUDA)),
    (PricedVerification, seams.VERIFICATION, (CPU, CUDA)),
    (DHiSparseLatentSpec, SPEC, (CPU, CUDA)),
    (DHiSparseBackend, seams.BACKEND, (CPU, CUDA)),
    (DHiSparseMetadataBuilder, seams.BUILDER, (CPU,)),
    (DHiSparseImpl, seams.IMPL, (CPU,)),
    (CudaBackend, seams.BACKEND, (CUDA,)),
    (CudaMetadataBuilder, seams.BUILDER, (CUDA,)),
    (CudaImpl, seams.IMPL, (CUDA,)),
    (CudaImpl, "v1/attention/backend.py:AttentionImplBase", (CUDA,)),
    (CudaHooks, seams.CUDA_PLATFORM, (CUDA,)),
    (DraftSpeculator, seams.SPECULATOR, (CPU, CUDA)),
    (_addressed_builder(Base), INDEXER, (CUDA,), ["build"]),
    (_addressed_builder(Base), seams.BUILDER, (CUDA,), ["__init__"]),
    (_addressed_cache(Base), CACHE, (CUDA,)),
]


def overridden():
    for cls, place, versions, *chosen in OVERRIDES:
        names = [n for n in vars(cls) if f"{place}.{n}" in RECORD[CUDA]]
        names = chosen[0] if chosen else names
        assert names, f"{cls.__name__} overrides nothing of {place}"
        for name in names:
            for version in versions:
                yield pytest.param(cls, name, f"{place}.{name}", version, id=f"{place}.{name}")


@pytest.mark.parametrize(("cls", "name", "seam", "version"), list(overridden()))
def test_our_methods_can_be_called_as_vllm_calls_its_own(cls, name, seam, version):
    ours = vars(cls)[name]
    if isinstance(ours, property):
        return
    ours = ours.__func__ if isinstance(ours, classmethod | staticmethod) else ours
    parameters = list(inspect.signature(ours).parameters.values())
    if not isinstance(vars(cls)[name], staticmethod):
        parameters = parameters[1:]
    kinds = {p.kind for p in parameters}
    takes_any_name = inspect.Parameter.VAR_KEYWORD in kinds
    takes_any_place = inspect.Parameter.VAR_POSITIONAL in kinds
    theirs = RECORD[version][seam]
    names = [p.name for p in parameters]
    by_name = [p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY]
    for place, (argument, kind, _) in enumerate(theirs):
        if kind in ("*", "**"):
            assert takes_any_name if kind == "**" else takes_any_place
        elif argument in by_name:  # as vLLM passes it
            pass
        elif kind == "positional" and not takes_any_place and argument in names:
            assert names.index(argument) == place, f"{argument} stands elsewhere"
        else:
            assert argument in names or takes_any_name, f"{argument} is not accepted"
    known = {argument for argument, *_ in theirs}
    for parameter in parameters:
        is_variable = parameter.kind in (
            inspect.Parameter.VAR_KEYWORD,
            inspect.Parameter.VAR_POSITIONAL,
        )
        optional = is_variable or parameter.default is not inspect.Parameter.empty
        any_kind = any(kind == "**" for _, kind, _ in theirs)
        assert optional or parameter.name in known or any_kind, f"vLLM gives no {parameter.name}"


@pytest.mark.parametrize("version", [CPU, CUDA])
def test_everything_that_we_use_is_there(version):
    assert [seam for seam, found in RECORD[version].items() if found in (None, False)] == []


@pytest.mark.parametrize("version", [CPU, CUDA])
@pytest.mark.parametrize(
    ("seam", "arguments"),
    [
        (f"{seams.POOL}.unpin_blocks", ["blocks", "on_reuse"]),
        (f"{seams.POOL}.touch", ["blocks"]),
        (f"{seams.POOL}.get_new_blocks", ["num_blocks"]),
        (f"{seams.POOL}.evict_blocks", ["block_ids"]),
        ("v1/attention/backends/registry.py:AttentionBackendEnum.register", ["name", "value"]),
        (
            "v1/kv_cache_spec_registry.py:KVCacheSpecRegistry.register",
            ["kvcache_spec_cls", "manager_class", "uniform_type_base_spec"],
        ),
        (f"{seams.MANAGER}.__init__", ["kv_cache_spec", "block_pool", "enable_caching"]),
    ],
)
def test_what_we_call_takes_what_we_give(version, seam, arguments):
    names = [name for name, *_ in RECORD[version][seam]]
    assert set(arguments) <= set(names), names


def test_the_installed_version_is_as_recorded():
    """A patch release may move a hook; then the record, and the code, must be looked at."""
    root = Path(vllm.__file__).parents[1]
    version = seams.version_of(root)
    if version not in RECORD:
        pytest.skip(f"vLLM {version} is not recorded; see tests/support/seams.py")
    found = seams.read(root)
    assert {k: v for k, v in found.items() if v != RECORD[version][k]} == {}


@pytest.mark.skipif("VLLM_033" not in os.environ, reason="run tests/vllm_033/run.sh")
def test_flash_mla_registers_the_schemas_that_we_call():
    registered = json.loads((Path(os.environ["VLLM_033"]) / "flashmla_schemas.json").read_text())
    assert registered == [DECODE_SCHEMA, PREFILL_SCHEMA]

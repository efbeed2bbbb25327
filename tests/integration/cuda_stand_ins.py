"""In the place of driver, device memory and vLLM's indexer, for the CUDA path on the CPU."""

import os
from time import perf_counter_ns
from types import SimpleNamespace

import torch
from fake_cuda_runtime import FakeCudaRuntime
from vllm.platforms.interface import DeviceCapability

from vllm_dhisparse.core.commands import UnitState
from vllm_dhisparse.integration import worker_side
from vllm_dhisparse.integration.cuda import backend, workspace
from vllm_dhisparse.runtime.cuda_pinner import CudaPinner
from vllm_dhisparse.runtime.ops import implementation
from vllm_dhisparse.runtime.tables import UNIT_ROWS

PLANE = os.environ.get("CUDA_PATH_PLANE", "cpu")
"""The implementation of the data plane that runs in the place of Triton's on a GPU."""


class Arena:
    """Device memory from which KV cache and staging come, the one before or behind the other.

    One index has to reach both, so they must not lie terabytes apart, as the host's may.
    """

    def __init__(self, staging_first):
        self.memory = torch.zeros(64 << 20, dtype=torch.uint8)
        self.staging_first = staging_first

    def staging(self, num_bytes, device):
        memory = self.memory if self.staging_first else self.memory[-num_bytes - 16 :]
        return memory[memory.data_ptr() % 16 :][:num_bytes]

    def cache(self, num_bytes):
        if not self.staging_first:
            return self.memory[:num_bytes]
        used = len(self.memory) - num_bytes
        return self.memory[used - used % 16 :][:num_bytes]


def data_plane(_):
    """Return the plane under test; only the tests use the CPU's for a device."""
    if PLANE == "triton":
        return implementation(PLANE)
    return SimpleNamespace(
        **vars(implementation(PLANE)),
        retrieve_in_place=implementation("reference").retrieve_in_place,
        start_clock=lambda started: started.fill_(perf_counter_ns()),
        stop_clock=stop_clock,
        note_ages=note_ages,
        count_hits=count_hits,
        raise_word=implementation("triton").raise_word,
    )


def stop_clock(started, generates, totals):
    totals[0 if generates else 1] += torch.tensor([perf_counter_ns() - int(started), 1])


def note_ages(tables, index_group, before, counts):
    """As the kernels do, see ``runtime.triton.measuring``."""
    group = tables.group(index_group)
    cache = (tables.unit_state >= UnitState.REQUIRED).repeat_interleave(UNIT_ROWS)
    cached = cache & (group.row_of_slot >= 0)
    before.copy_(torch.where(cached, group.age, 255))
    counts += torch.bincount(group.age[cached], minlength=len(counts))


def count_hits(resolution, before, counts):
    for plan in resolution.plans:
        slots = plan.slot[(plan.slot >= 0) & ~plan.fetch].long()
        ages = before[slots]
        counts += torch.bincount(ages[ages < 255], minlength=len(counts))
        before[slots] = 255


def arrange(monkeypatch, vllm_config, reason=None, alias=0, arena=None, capability=(9, 0)):
    """Put the stand-ins for driver and device in place."""
    runtime = FakeCudaRuntime(alias=alias)
    platform = SimpleNamespace(get_device_capability=lambda: DeviceCapability(*capability))
    monkeypatch.setattr(workspace, "current_platform", platform)
    if reason is not None:
        monkeypatch.setattr(workspace, "unavailable_reason", lambda _: reason)
    monkeypatch.setattr(backend, "get_current_vllm_config", lambda: vllm_config)
    monkeypatch.setattr(backend, "CudaPinner", lambda: CudaPinner(runtime))
    monkeypatch.setattr(worker_side, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(worker_side, "data_plane", data_plane)
    monkeypatch.setattr(workspace, "data_plane", data_plane)
    if arena is not None:
        monkeypatch.setattr(workspace, "allocate_staging", arena.staging)
    return runtime


class IndexerBuilder:
    """As vLLM's: it keeps nothing of the block table that a layer could use."""

    requires_block_table_width = True

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device, *, block_table_width):
        self.kv_cache_spec = kv_cache_spec

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return SimpleNamespace(seq_lens=common_attn_metadata.seq_lens)


class IndexerBackend:
    @staticmethod
    def get_builder_cls():
        return IndexerBuilder


class IndexerCache(torch.nn.Module):
    def get_attn_backend(self):
        return IndexerBackend

"""The address group on CUDA: vLLM's own indexer, whose metadata also carries its block table.

A host page belongs to a block of the first indexer group, so every layer needs that
group's table and slots. vLLM's indexer builds metadata of another shape; ours rides on it.
"""

from functools import cache
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_dhisparse.integration.cuda.metadata import BatchColumns, CudaMetadata
from vllm_dhisparse.integration.geometry import geometry

_ATTRIBUTE = "dhisparse_address"


def carry_address(k_cache: Any) -> None:
    """Let the metadata of an indexer's cache layer carry the address group's batch.

    The layer is in vLLM's table of layers already, so the object stays and its class changes.
    """
    base: Any = type(k_cache)
    k_cache.__class__ = _addressed_cache(base)


def address_of(metadata: Any) -> CudaMetadata:
    """Return the batch that rides on the metadata of an indexer layer."""
    batch: CudaMetadata = getattr(metadata, _ATTRIBUTE)
    return batch


@cache
def _addressed_cache(base: Any) -> type:
    def get_attn_backend(self: Any) -> type:
        return _addressed_backend(base.get_attn_backend(self))

    return type(base.__name__, (base,), {"get_attn_backend": get_attn_backend})


@cache
def _addressed_backend(base: Any) -> type:
    def get_builder_cls() -> type:
        return _addressed_builder(base.get_builder_cls())

    return type(base.__name__, (base,), {"get_builder_cls": staticmethod(get_builder_cls)})


@cache
def _addressed_builder(base: Any) -> type:
    class AddressedBuilder(base):
        """vLLM's builder, whose result carries a `CudaMetadata`."""

        def __init__(
            self,
            kv_cache_spec: Any,
            layer_names: list[str],
            vllm_config: VllmConfig,
            device: torch.device,
            **kwargs: Any,
        ) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device, **kwargs)
            page_tokens = geometry(vllm_config).plan.indexer_block_tokens
            block_size = kv_cache_spec.block_size
            if page_tokens % block_size:  # resident: the group keeps vLLM's block size
                page_tokens = block_size
            self._columns = BatchColumns(vllm_config, block_size, page_tokens, device)

        def build(
            self,
            common_prefix_len: int,
            common_attn_metadata: CommonAttentionMetadata,
            fast_build: bool = False,
        ) -> Any:
            metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
            setattr(metadata, _ATTRIBUTE, self._columns.build(common_attn_metadata))
            return metadata

    return AddressedBuilder

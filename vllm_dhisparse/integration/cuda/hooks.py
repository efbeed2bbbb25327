"""What DHISPARSE changes in the configuration of an engine on CUDA."""

from typing import TYPE_CHECKING, Any

from vllm_dhisparse.integration.backend_registration import is_dhisparse
from vllm_dhisparse.integration.names import FP8_ROWS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_FP8 = ("fp8", "fp8_e4m3")


class CudaHooks:
    """For a subclass of vLLM's CUDA platform; nothing changes where DHISPARSE is not chosen."""

    @classmethod
    def check_and_update_config(cls, vllm_config: "VllmConfig") -> None:
        """Refuse what cannot work, then add the connector."""
        from vllm_dhisparse.integration.choice import add_connector, checked_choice

        stock: Any = super()
        if is_dhisparse(vllm_config.attention_config.backend):
            _name_fp8_rows(vllm_config)
        chosen = checked_choice(vllm_config)
        stock.check_and_update_config(vllm_config)
        if chosen and vllm_config.model_config is not None:
            add_connector(vllm_config)


def _name_fp8_rows(vllm_config: "VllmConfig") -> None:
    """Say ``fp8_ds_mla`` where the user, or vLLM for GLM on Blackwell, said fp8.

    vLLM does this by the name of its own backend. Under another name fp8 would be one scale
    for a whole tensor, which is another row.
    """
    cache, speculation = vllm_config.cache_config, vllm_config.speculative_config
    if cache.cache_dtype in _FP8:
        cache.cache_dtype = FP8_ROWS
    # A drafter, whose layers are ordinary attention, would inherit a name it cannot have.
    if cache.cache_dtype == FP8_ROWS and speculation is not None and not speculation.kv_cache_dtype:
        speculation.kv_cache_dtype = "auto"

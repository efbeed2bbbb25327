"""Windows of drafters of the DFlash family, by their configuration."""

from typing import Any


def attends_to_all(hf_config: Any) -> bool:
    """Whether no layer of a drafter of the DFlash family has a window."""
    settings = getattr(hf_config, "dflash_config", None) or {}
    layer_types = getattr(hf_config, "layer_types", None) or []
    return not settings.get("use_swa", False) and "sliding_attention" not in layer_types


def impose_window(hf_config: Any, window: int) -> None:
    """Give every layer of a drafter that `attends_to_all` a window; nothing else changes.

    Without an explicit choice full layers of this family are not causal, windowed ones are.
    """
    if not attends_to_all(hf_config):
        return
    settings = dict(getattr(hf_config, "dflash_config", None) or {})
    settings.setdefault("causal", False)
    hf_config.dflash_config = settings | {"swa_window_size": window}
    hf_config.layer_types = ["sliding_attention"] * hf_config.num_hidden_layers

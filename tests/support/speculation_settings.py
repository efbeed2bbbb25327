"""vLLM's option for tiny drafters."""

from typing import Any


def speculative_config(method: str, drafter: Any, num_drafts: int, **more: Any) -> dict[str, Any]:
    """Return it; DFlash2 is a kind of dflash to vLLM."""
    name = "dspark" if method == "dspark" else "dflash"
    return {"method": name, "model": str(drafter), "num_speculative_tokens": num_drafts} | more

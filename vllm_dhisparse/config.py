"""The package's own settings: ``--additional-config '{"dhisparse": {...}}'``."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

RESIDENCIES = ("resident",)
PLANNED_RESIDENCIES = ("fixed", "adaptive")


@dataclass(frozen=True, slots=True)
class DHiSparseConfig:
    """Settings of one engine. Every value carries its unit in its name.

    Attributes:
        residency: where the latent KV history lives. ``resident``: all of it on the
            device, in vLLM's own blocks (the exactness oracle and a baseline).

    Raises:
        ValueError: a value is out of its range; the message names the setting.

    """

    residency: str = "resident"

    def __post_init__(self) -> None:
        if self.residency in PLANNED_RESIDENCIES:
            raise ValueError(
                f"dhisparse.residency {self.residency!r} is not part of this release yet; "
                f"use one of: {', '.join(RESIDENCIES)}"
            )
        if self.residency not in RESIDENCIES:
            raise ValueError(
                f"dhisparse.residency must be one of: {', '.join(RESIDENCIES)}; "
                f"got {self.residency!r}"
            )

    @classmethod
    def from_mapping(cls, settings: Mapping[str, Any] | None) -> "DHiSparseConfig":
        """Build from the user's mapping; unknown keys are refused with the known ones."""
        if settings is None:
            return cls()
        if not isinstance(settings, Mapping):
            raise ValueError(
                "additional_config['dhisparse'] must be a mapping of settings, for example "
                f'{{"residency": "resident"}}; got {settings!r}'
            )
        known = [field.name for field in fields(cls)]
        for key in settings:
            if key not in known:
                close = get_close_matches(str(key), known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ValueError(
                    f"unknown setting dhisparse.{key}{hint} Known settings: {', '.join(known)}"
                )
        return cls(**settings)

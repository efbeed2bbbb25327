"""The package's own settings: ``--additional-config '{"dhisparse": {...}}'``."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from math import isfinite
from typing import Any

from vllm_dhisparse.core.controller import ResidencyController

RESIDENCIES = ("resident", "fixed", "adaptive")
DRAFT_KV = ("ring", "full")


@dataclass(frozen=True, slots=True)
class DHiSparseConfig:
    """Settings of one engine. Every value carries its unit in its name.

    Attributes:
        residency: where the latent KV history lives. ``resident``: all of it on the
            device, in vLLM's own blocks (the exactness oracle and a baseline).
            ``fixed``: in host memory, with a constant number of rows on the device for
            each running request (the HiSparse baseline). ``adaptive``: the same with a
            smaller constant, plus memory that is spare, given back under pressure.
        host_pool_gib: host memory for the history, of each engine (data-parallel rank),
            shared by its tensor-parallel ranks. Default: half of the memory that vLLM's
            KV cache leaves, at most what ``max_num_seqs`` requests of ``max_model_len``
            tokens need.
        fixed_rows_per_request: rows on the device per running request under ``fixed``
            beside its tail, rounded up to whole units of 64; less while its history is
            shorter. Default: 2 x index_topk.
        base_rows_per_request: the same under ``adaptive``. Default: index_topk.
        staging_rows: rows of one layer that a step can read at once, at least index_topk;
            larger unions are served in passes. Default: 2 x max_num_seqs x index_topk.
        head_reserve_blocks, dwell_steps, low_watermark_ratio, high_watermark_ratio,
        adopt_units_per_step, restore_rows_per_step: of ``adaptive``, see
            `core.controller.ResidencyController`. Default of ``head_reserve_blocks``: what
            one scheduler step can take; of ``adopt_units_per_step``: 32 blocks, and at
            least 4 units.
        stats_interval_steps: steps between two looks at the ages of hit rows and at what
            each request reads, for the metrics.
        draft_kv: ``ring``: windowed layers of a drafter keep only the rows that a draft can
            see, whatever the context. ``full``: vLLM's own managers keep draft KV. Default:
            ``ring`` on a CPU, ``full`` on CUDA, which has no rings yet.
        draft_window_tokens: window for the layers of a drafter that attends to all tokens,
            so that rings can hold its KV. Changes what the drafter proposes, never what is
            accepted. Default: none.
        huge_pages: whether the host pool asks for 2 MiB pages.
        numa_nodes: memory node of the host pool of each tensor-parallel rank. Default: as
            the operating system chooses.
        record_traces: folder for the selections of every request that decodes, one file for
            each in the format of `core.traces`; for analysis, it slows every step. Default:
            nothing is recorded.

    Raises:
        ValueError: a value is out of its range; the message names the setting.

    """

    residency: str = "adaptive"
    host_pool_gib: float | None = None
    fixed_rows_per_request: int | None = None
    base_rows_per_request: int | None = None
    staging_rows: int | None = None
    head_reserve_blocks: int | None = None
    dwell_steps: int = 16
    low_watermark_ratio: float = 0.01
    high_watermark_ratio: float = 0.03
    adopt_units_per_step: int | None = None
    restore_rows_per_step: int = 2048
    stats_interval_steps: int = 32
    draft_kv: str | None = None
    draft_window_tokens: int | None = None
    huge_pages: bool = True
    numa_nodes: Sequence[int] | None = None
    record_traces: str | None = None

    def __post_init__(self) -> None:
        _require_one_of("residency", self.residency, RESIDENCIES)
        if self.draft_kv is not None:
            _require_one_of("draft_kv", self.draft_kv, DRAFT_KV)
        _require_positive("host_pool_gib", self.host_pool_gib)
        _require_whole("fixed_rows_per_request", self.fixed_rows_per_request, least=0)
        _require_whole("base_rows_per_request", self.base_rows_per_request, least=0)
        _require_whole("staging_rows", self.staging_rows, least=1)
        _require_whole("draft_window_tokens", self.draft_window_tokens, least=1)
        _require_whole("head_reserve_blocks", self.head_reserve_blocks, least=0)
        _require_whole("stats_interval_steps", self.stats_interval_steps, least=1, or_none=False)
        try:
            self.controller(head_reserve_blocks=0, blocks_per_unit=1)
        except ValueError as error:
            raise ValueError(f"dhisparse.{error}") from error
        if not isinstance(self.huge_pages, bool):
            raise ValueError(f"dhisparse.huge_pages must be true or false; got {self.huge_pages!r}")
        if self.record_traces is not None and not (
            isinstance(self.record_traces, str) and self.record_traces.strip()
        ):
            raise ValueError(
                f"dhisparse.record_traces must be the name of a folder; got {self.record_traces!r}"
            )
        if self.numa_nodes is not None:
            _require_list("numa_nodes", self.numa_nodes)

    def controller(self, head_reserve_blocks: int, blocks_per_unit: int) -> ResidencyController:
        """Return the controller of ``adaptive`` with these settings.

        Args:
            head_reserve_blocks: see `ResidencyController`.
            blocks_per_unit: latent KV groups. What adopting costs the scheduler grows with
                the blocks, hence the default bound.

        """
        adopt_units = self.adopt_units_per_step
        if adopt_units is None:
            adopt_units = max(4, 32 // blocks_per_unit)
        return ResidencyController(
            head_reserve_blocks=head_reserve_blocks,
            dwell_steps=self.dwell_steps,
            low_watermark_ratio=self.low_watermark_ratio,
            high_watermark_ratio=self.high_watermark_ratio,
            adopt_units_per_step=adopt_units,
            restore_rows_per_step=self.restore_rows_per_step,
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
                hint = f"; did you mean {close[0]!r}?" if close else "."
                raise ValueError(
                    f"unknown setting dhisparse.{key}{hint} Known settings: {', '.join(known)}"
                )
        return cls(**settings)


def _require_one_of(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"dhisparse.{name} must be one of: {', '.join(known)}; got {value!r}")


def _require_positive(name: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and isfinite(value) and value > 0):
        raise ValueError(f"dhisparse.{name} must be a number above 0; got {value!r}")


def _require_whole(name: str, value: Any, least: int, or_none: bool = True) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not ((is_whole and value >= least) or (value is None and or_none)):
        raise ValueError(
            f"dhisparse.{name} must be a whole number of at least {least}; got {value!r}"
        )


def _require_list(name: str, value: Any) -> None:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"dhisparse.{name} must be a list of whole numbers; got {value!r}")
    for number in value:
        if number is None:
            raise ValueError(f"dhisparse.{name} must hold whole numbers; got {value!r}")
        _require_whole(name, number, least=0)

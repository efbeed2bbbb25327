"""Carries metric values from workers and scheduler to vLLM's own /metrics."""

from typing import Any

import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)

from vllm_dhisparse import __version__
from vllm_dhisparse.integration.geometry import dhisparse_config
from vllm_dhisparse.metrics import (
    FETCHED_ROWS,
    METRICS,
    MODE_INFO,
    PREFIX,
    SELECTED_ROWS,
    Metric,
)


class DHiSparseStats(KVConnectorStats):
    """Counters and observations since the last report, and the latest gauges, by `Metric.key`."""

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.data: dict[str, Any] = {}
        self.reset()
        self.data.update(data or {})

    def reset(self) -> None:
        """Forget everything."""
        self.data = {"counters": {}, "gauges": {}, "observations": {}}

    def add(self, key: str, amount: float) -> None:
        """Count ``amount`` more of ``key``."""
        counters = self.data["counters"]
        counters[key] = counters.get(key, 0) + amount

    def observe(self, key: str, value: float) -> None:
        """Put a value in the histogram ``key``."""
        self.data["observations"].setdefault(key, []).append(value)

    def aggregate(self, other: KVConnectorStats) -> "DHiSparseStats":
        """Add the other's counters and observations and take its gauges."""
        for key, amount in other.data["counters"].items():
            self.add(key, amount)
        self.data["gauges"].update(other.data["gauges"])
        for key, values in other.data["observations"].items():
            self.data["observations"].setdefault(key, []).extend(values)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the figures of vLLM's periodic log line."""
        counters = self.data["counters"]
        total = {
            metric.name: sum(counters.get(metric.key(*values), 0) for values in metric.series())
            for metric in (SELECTED_ROWS, FETCHED_ROWS)
        }
        return {"dhisparse " + name.replace("_", " "): value for name, value in total.items()}

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not any(self.data.values())


class DHiSparsePromMetrics(KVConnectorPromMetrics):
    """Prometheus families of this package, prefix ``vllm:dhisparse_``."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        # Every series exists from the start, so that rate() has a zero to begin at.
        self._series: dict[tuple[int, str], Any] = {}
        for metric in METRICS:
            family = self._family(metric)
            for engine, engine_values in per_engine_labelvalues.items():
                for values in metric.series():
                    child = family.labels(*engine_values, *values)
                    self._series[engine, metric.key(*values)] = child
        self._describe(vllm_config)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add counters and observations and set gauges of one report."""
        for key, amount in transfer_stats_data["counters"].items():
            self._series[engine_idx, key].inc(amount)
        for key, value in transfer_stats_data["gauges"].items():
            self._series[engine_idx, key].set(value)
        for key, values in transfer_stats_data["observations"].items():
            for value in values:
                self._series[engine_idx, key].observe(value)

    def _family(self, metric: Metric) -> Any:
        # Ray replaces the metric classes, hence vLLM hands them in.
        options: dict[str, Any] = {
            "name": PREFIX + metric.name,
            "documentation": metric.documentation,
            "labelnames": [*self._labelnames, *(label for label, _ in metric.labels)],
        }
        if metric.kind == "counter":
            return self._counter_cls(**options)
        if metric.kind == "histogram":
            return self._histogram_cls(**options, buckets=metric.buckets)
        return self._gauge_cls(**options, multiprocess_mode="mostrecent")

    def _describe(self, vllm_config: VllmConfig) -> None:
        speculation = vllm_config.speculative_config
        info = {
            "residency": dhisparse_config(vllm_config).residency,
            "version": __version__,
            "vllm_version": vllm.__version__,
            "speculation": "none" if speculation is None else str(speculation.method),
            "index_topk": str(vllm_config.model_config.hf_text_config.index_topk),
        }
        family = self._family(MODE_INFO)
        for values in self.per_engine_labelvalues.values():
            family.labels(*values, *(info[label] for label, _ in MODE_INFO.labels)).set(1)

"""PromQL of the panels: our metrics by what the code defines, vLLM's own by name."""

from vllm_dhisparse.metrics import Metric

VARIABLES = ("job", "model_name", "instance", "engine")
"""Dashboard variables and labels in one; their selection restricts every query."""

SELECTED = ", ".join(f'{name}=~"${name}"' for name in VARIABLES)
GENERATING = ("decode", "verify")
"""The phases that the fetch ratio is about."""


def series(metric: Metric | str, sample: str = "", **labels: str | tuple[str, ...]) -> str:
    """Return the selector of a metric's series.

    Args:
        metric: ours, whose labels and values are checked, or the name of one of vLLM's.
        sample: ``bucket``, ``sum`` or ``count`` of a histogram.
        labels: the value, or one of several.

    Raises:
        ValueError: our metric has no such label, value or sample.

    """
    if isinstance(metric, str):
        name = f"{metric}_{sample}" if sample else metric
    else:
        (name,) = (each for each in metric.samples() if each.endswith(sample and f"_{sample}"))
        known = dict(metric.labels)
        for label, wanted in labels.items():
            for value in (wanted,) if isinstance(wanted, str) else wanted:
                if value not in known.get(label, ()):
                    raise ValueError(f"{metric.name} has no {label}={value!r}")
    own = [
        f'{label}="{value}"' if isinstance(value, str) else f'{label}=~"{"|".join(value)}"'
        for label, value in labels.items()
    ]
    return f"{name}{{{', '.join([SELECTED, *own])}}}"


def level(metric: Metric | str, *by: str, **labels: str | tuple[str, ...]) -> str:
    """Return the sum of a gauge over engines, apart by the labels ``by``."""
    return f"{_sum(by)} ({series(metric, **labels)})"


def rate(metric: Metric | str, *by: str, sample: str = "", **labels: str | tuple[str, ...]) -> str:
    """Return the growth per second of a counter, summed like `level`."""
    return f"{_sum(by)} (rate({series(metric, sample, **labels)}[$__rate_interval]))"


def quantile(share: float, metric: Metric | str, *by: str, **labels: str | tuple[str, ...]) -> str:
    """Return a quantile of a histogram over all engines."""
    buckets = rate(metric, "le", *by, sample="bucket", **labels)
    return f"histogram_quantile({share:g}, {buckets})"


def mean(metric: Metric | str, *by: str, **labels: str | tuple[str, ...]) -> str:
    """Return the mean of a histogram's observations."""
    total = rate(metric, *by, sample="sum", **labels)
    return ratio(total, rate(metric, *by, sample="count", **labels))


def ratio(part: str, whole: str) -> str:
    """Return a quotient that has no value where nothing happens."""
    return f"{part} / ({whole} > 0)"


def _sum(by: tuple[str, ...]) -> str:
    return f"sum by ({', '.join(by)})" if by else "sum"

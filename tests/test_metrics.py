import generate
import pytest

from vllm_dhisparse.core.clock import MAX_AGE
from vllm_dhisparse.metrics import FETCHED_ROWS, METRICS, SAMPLED_HITS, SELECTED_ROWS


def test_every_series_has_its_own_key():
    keys = [metric.key(*values) for metric in METRICS for values in metric.series()]
    assert len(keys) == len(set(keys))


def test_ages_are_those_of_the_clock():
    assert SAMPLED_HITS.series() == [(str(age),) for age in range(MAX_AGE + 1)]


def test_series_are_all_combinations_of_labels():
    assert len(SELECTED_ROWS.series()) == 4 * 3
    assert FETCHED_ROWS.series() == [("prefill",), ("decode",), ("verify",)]


@pytest.mark.parametrize("values", [(), ("tail",), ("tail", "draft"), ("gpu", "decode")])
def test_a_key_needs_known_label_values(values):
    with pytest.raises(AssertionError):
        SELECTED_ROWS.key(*values)


def test_every_file_generated_from_the_metrics_is_up_to_date():
    assert generate.main(["--check"]) == 0, "run: python grafana/generate.py"

import pytest

from vllm_dhisparse.config import DHiSparseConfig


def test_defaults_suffice():
    assert DHiSparseConfig.from_mapping(None) == DHiSparseConfig.from_mapping({})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"residncy": "resident"}, "unknown setting dhisparse.residncy; did you mean 'residency'?"),
        ({"x": 1}, "unknown setting dhisparse.x. Known settings: residency, host_pool_gib"),
        (
            {"residency": "all"},
            "dhisparse.residency must be one of: resident, fixed, adaptive; got 'all'",
        ),
        ({"residency": 3}, "dhisparse.residency must be one of: resident, fixed, adaptive; got 3"),
        ({"host_pool_gib": 0}, "dhisparse.host_pool_gib must be a number above 0; got 0"),
        ({"host_pool_gib": "8"}, "dhisparse.host_pool_gib must be a number above 0; got '8'"),
        ({"host_pool_gib": float("nan")}, "dhisparse.host_pool_gib must be a number above 0"),
        ({"host_pool_gib": float("inf")}, "dhisparse.host_pool_gib must be a number above 0"),
        (
            {"staging_rows": 2.5},
            "staging_rows must be a whole number of at least 1; got 2.5",
        ),
        ({"staging_rows": True}, "dhisparse.staging_rows must be a whole number of at least 1"),
        (
            {"fixed_rows_per_request": -1},
            "must be a whole number of at least 0; got -1",
        ),
        (
            {"stats_interval_steps": 0},
            "dhisparse.stats_interval_steps must be a whole number of at least 1; got 0",
        ),
        ({"stats_interval_steps": None}, "must be a whole number of at least 1; got None"),
        ({"record_traces": ""}, "dhisparse.record_traces must be the name of a folder; got ''"),
        ({"record_traces": 3}, "dhisparse.record_traces must be the name of a folder; got 3"),
        ({"huge_pages": 1}, "dhisparse.huge_pages must be true or false; got 1"),
        ({"dwell_steps": -1}, "dhisparse.dwell_steps must be a whole number, 0 or more; got -1"),
        ({"low_watermark_ratio": 2}, "dhisparse.low_watermark_ratio must be a share from 0 to 1"),
        ({"low_watermark_ratio": 0.5}, "low_watermark_ratio must not be above high_watermark"),
        ({"head_reserve_blocks": 1.5}, "dhisparse.head_reserve_blocks must be a whole number"),
        ({"numa_nodes": 0}, "dhisparse.numa_nodes must be a list of whole numbers; got 0"),
        ({"numa_nodes": []}, "dhisparse.numa_nodes must be a list of whole numbers; got []"),
        ({"numa_nodes": [None]}, "dhisparse.numa_nodes must hold whole numbers; got [None]"),
        ({"numa_nodes": [-1]}, "dhisparse.numa_nodes must be a whole number of at least 0"),
        (["residency"], "must be a mapping of settings"),
        ("resident", "must be a mapping of settings"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match="dhisparse") as error:
        DHiSparseConfig.from_mapping(settings)
    assert message in str(error.value)


def test_settings_cannot_change_later():
    with pytest.raises(AttributeError):
        DHiSparseConfig().residency = "resident"


@pytest.mark.parametrize(("groups", "units"), [(1, 32), (4, 8), (20, 4)])
def test_the_bound_on_adoption_follows_what_a_unit_costs(groups, units):
    assert DHiSparseConfig().controller(0, groups).adopt_units_per_step == units
    chosen = DHiSparseConfig(adopt_units_per_step=5)
    assert chosen.controller(0, groups).adopt_units_per_step == 5

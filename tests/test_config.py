import pytest

from vllm_dhisparse.config import DHiSparseConfig


def test_defaults_suffice():
    assert DHiSparseConfig.from_mapping(None) == DHiSparseConfig.from_mapping({})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"residncy": "resident"}, "unknown setting dhisparse.residncy; did you mean 'residency'?"),
        ({"x": 1}, "unknown setting dhisparse.x Known settings: residency"),
        ({"residency": "all"}, "dhisparse.residency must be one of: resident; got 'all'"),
        ({"residency": 3}, "dhisparse.residency must be one of: resident; got 3"),
        ({"residency": "adaptive"}, "'adaptive' is not part of this release yet"),
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

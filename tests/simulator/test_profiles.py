import pytest

from vllm_dhisparse.simulator.geometry import load_models, model_named
from vllm_dhisparse.simulator.profiles import NAMES, parse_profile, profile_named
from vllm_dhisparse.simulator.step_time import Roofline, StepLoad
from vllm_dhisparse.simulator.workload_files import parse_load

PROFILES = ("h200-pcie", "b200-pcie", "gb200-c2c", "cpu")


@pytest.mark.parametrize("name", PROFILES)
def test_every_number_says_where_it_is_from(name):
    profile = profile_named(name)
    assert set(profile.figures) == set(NAMES)
    assert all(figure.source for figure in profile.figures.values())
    assert profile.note


def test_six_numbers_are_fitted():
    fitted = {name: profile_named(name).of_kind("fitted") for name in PROFILES}
    assert len(fitted["h200-pcie"]) == 6


def test_a_profile_without_a_source_is_refused():
    text = 'gpus = { value = 8, kind = "published", source = "" }'
    with pytest.raises(ValueError, match="gpus needs a source"):
        parse_profile("mine", text)
    with pytest.raises(ValueError, match="exactly value, kind and source"):
        parse_profile("mine", "gpus = 8")
    with pytest.raises(ValueError, match="no all_to_all_gb_s"):
        parse_profile("mine", 'gpus = { value = 8, kind = "published", source = "x" }')
    with pytest.raises(ValueError, match="not TOML"):
        parse_profile("mine", "gpus =")


def test_a_changed_number_counts_as_assumed():
    profile = profile_named("h200-pcie").replaced(link_gb_s=25)
    assert profile["link_gb_s"] == 25
    assert "link_gb_s" in profile.of_kind("assumed")


def test_sizes_are_the_published_ones():
    model = model_named("glm-5.3")
    assert model.token_bytes == 78 * 656
    assert model.indexer_bytes == 21 * 132
    assert model.page_tokens == 320
    assert {*load_models()} >= {"glm-5.1", "glm-5.3", "deepseek-v3.2", "deepseek-v4.1-flash"}


def test_a_scaled_model_has_the_same_bytes_and_times():
    profile, model = profile_named("h200-pcie"), model_named("glm-5.3-4bit")
    small = model.scaled(160)
    assert small.scale == pytest.approx(12.8)
    load = StepLoad(16, 128, 1.6e6, 4000.0, 500.0, True, True)
    whole, part = Roofline(profile, model).step(load), Roofline(profile, small).step(load)
    assert part == pytest.approx(whole, rel=0.01)


def test_time_grows_with_what_is_asked():
    hardware = Roofline(profile_named("h200-pcie"), model_named("glm-5.3-4bit"))
    calm = StepLoad(16, 16, 1.6e6, 0.0, 0.0, True, False)
    times = [hardware.step(calm).total]
    times += [
        hardware.step(calm._replace(**change)).total
        for change in (
            {"fetched_rows": 4000.0},
            {"queries": 128},
            {"context_tokens": 3.2e6},
            {"has_drafts": True},
            {"restored_rows": 1e6},
        )
    ]
    assert all(time > times[0] for time in times[1:])
    assert hardware.step(calm._replace(restored_rows=1000.0)).total == times[0], "beside the step"
    # Published: 16 x 2,048 x 13.4 % rows take a little over 100 us a layer over PCIe.
    fetch = hardware.step(calm._replace(fetched_rows=16 * 2048 * 0.134)).fetch
    assert fetch / 78 * 1e3 == pytest.approx(57, abs=5)  # rows of 656 B, not 1,152 B


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("contexts =", "not TOML"),
        ("speed = 1", "unknown speed"),
        ("contexts = [1]\noutput_tokens = 1", "'phases'"),
        ("contexts = []\noutput_tokens = 1\nphases = [{steps=1,concurrency=1}]", "above 0"),
        ("contexts = [9]\noutput_tokens = 1\nphases = [{steps=0,concurrency=1}]", "needs a step"),
    ],
)
def test_a_wrong_workload_is_refused(text, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        parse_load("mine", text, tmp_path)

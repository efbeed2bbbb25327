"""Alerts and configuration under promtool."""

import subprocess
from pathlib import Path

import pytest
from prometheus_server import find

GRAFANA = Path(__file__).parents[2] / "grafana"
RULES = GRAFANA / "rules" / "dhisparse.rules.yaml"
PROMTOOL = find("promtool")
pytestmark = pytest.mark.skipif(
    PROMTOOL is None, reason="no promtool here: bash grafana/get_prometheus.sh"
)


def promtool(*arguments):
    return subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True)


def test_the_configuration_is_valid():
    done = promtool("check", "config", GRAFANA / "prometheus.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_when_it_should_and_only_then():
    done = promtool("test", "rules", GRAFANA / "rules" / "dhisparse.rules_test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("old", "new", "alert"),
    [
        ("> 0.2", "> 0.15", "DHiSparseFetchRatioHigh"),
        ("decode|verify", "decode|verify|prefill", "DHiSparseFetchRatioHigh"),
        ("pressure_ratio < 0.8", "pressure_ratio < 0.9", "DHiSparseFetchRatioHigh"),
        ('state="held"', 'state=~"held|idle"', "DHiSparseHostPoolNearlyFull"),
        ("waits_total[5m]", "waits_total[30m]", "DHiSparseHostPoolWaits"),
        ("> 5 *", "> 3 *", "DHiSparseControllerFlapping"),
    ],
)
def test_a_rule_that_is_off_fails_the_tests(tmp_path, old, new, alert):
    text = RULES.read_text()
    assert old in text
    (tmp_path / RULES.name).write_text(text.replace(old, new))
    tests = tmp_path / "dhisparse.rules_test.yaml"
    tests.write_text((RULES.parent / tests.name).read_text())
    done = promtool("test", "rules", tests)
    assert done.returncode != 0
    assert alert in done.stdout + done.stderr

"""Drafters on a CPU: which environment an engine's processes get, and what is refused."""

import os
import subprocess
import sys

import pytest
from make_tiny_drafter import TinyDrafter, write
from speculation_settings import speculative_config
from vllm import EngineArgs

from vllm_dhisparse.integration import v2_runner

NAMES = ("DHISPARSE_TRITON_INTERPRETER", "TRITON_INTERPRET", "VLLM_USE_V2_MODEL_RUNNER")


@pytest.fixture
def pair(tiny_dsa, tmp_path, monkeypatch):
    """A target and a drafter; the environment is left as it was."""
    for name in NAMES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(v2_runner, "_set_here", set())
    model = tiny_dsa(layers=2, leaders=1)
    write(TinyDrafter(window=40), model, tmp_path)
    return model, tmp_path


def configure(pair, method="dspark", settings=None, **options):
    model, drafter = pair
    if method is not None:
        options["speculative_config"] = speculative_config(method, drafter, 4)
    return EngineArgs(
        model=str(model),
        attention_backend="DHISPARSE",
        max_model_len=1024,
        additional_config={"dhisparse": settings or {}},
        **options,
    ).create_engine_config()


def test_engines_in_processes_of_their_own_inherit_the_interpreter(pair, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    config = configure(pair)
    assert [os.environ.get(name) for name in NAMES] == ["1", "1", "1"]
    assert config.use_v2_model_runner
    assert not configure(pair, None).use_v2_model_runner
    assert not any(name in os.environ for name in NAMES), "the next engine needs none of it"


def test_settings_of_the_user_stay(pair, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    configure(pair)
    with pytest.raises(ValueError, match="Model Runner V2 requires Triton"):
        configure(pair, None)
    assert os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert "TRITON_INTERPRET" not in os.environ


def test_an_engine_in_a_process_that_was_not_prepared(pair, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with pytest.raises(ValueError, match="must be set up before torch and vLLM are imported") as e:
        configure(pair)
    assert "set DHISPARSE_TRITON_INTERPRETER=1 and TRITON_INTERPRET=1" in str(e.value)
    assert not any(name in os.environ for name in NAMES)


def test_the_v1_runner_has_no_such_drafts(pair, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match="remove VLLM_USE_V2_MODEL_RUNNER=0"):
        configure(pair)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (None, "draft_window_tokens needs a drafter"),
        ("dspark", "the drafter's layers have windows"),
    ],
)
def test_a_window_that_cannot_be_imposed(pair, monkeypatch, method, message):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ValueError, match=message):
        configure(pair, method, {"draft_window_tokens": 64})


def test_the_interpreter_serves_where_the_environment_asks_for_it():
    script = "import vllm; from vllm.triton_utils import HAS_TRITON; print(HAS_TRITON)"
    found = []
    for asked in ({}, dict.fromkeys(NAMES[:2], "1"), {NAMES[0]: "1"}):
        environment = {k: v for k, v in os.environ.items() if k not in NAMES} | asked
        run = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True
        )
        found.append(run.stdout.strip())
    assert found == ["False", "True", "False"]

"""Checks that look at numbers, without an environment."""

import pytest

from vllm_dhisparse.cli import main
from vllm_dhisparse.doctor import command, memory
from vllm_dhisparse.doctor.engine import judge
from vllm_dhisparse.doctor.finding import error, ok, warning
from vllm_dhisparse.doctor.programs import ProgramError, run_json_program, run_program
from vllm_dhisparse.runtime.available_memory import GroupMemory

GIB = 2**30
SEEN = {"backend": "a.Backend", "refusal": None, "connector": True}


@pytest.mark.parametrize(
    ("pool", "available", "status"),
    [
        (None, 8 * GIB, "ok"),
        (None, GIB // 2, "warning"),
        (4 * GIB, 8 * GIB, "ok"),
        (4 * GIB, 4 * GIB, "warning"),
        (4 * GIB, 4 * GIB - 1, "error"),
    ],
)
def test_the_host_pool_against_the_memory(pool, available, status):
    assert memory.check_host_memory(pool, available).status == status


@pytest.mark.parametrize(
    ("group", "status"),
    [(None, "ok"), (GroupMemory(64 * GIB, 9), "ok"), (GroupMemory(8 * GIB, GIB), "warning")],
)
def test_a_control_group_below_the_machine(group, status):
    found = memory.check_control_group(group, 32 * GIB)
    assert found.status == status
    assert status == "ok" or "8.0 of 32.0 GiB, 1.0 GiB left" in found.detail


@pytest.mark.parametrize(
    ("pool", "limit", "is_cuda", "status"),
    [
        (GIB, 8 << 20, False, "ok"),
        (GIB, 8 << 20, True, "warning"),
        (None, 8 << 20, True, "warning"),
        (GIB, 2 * GIB, True, "ok"),
        (GIB, memory.resource.RLIM_INFINITY, True, "ok"),
    ],
)
def test_locked_memory_matters_with_cuda(pool, limit, is_cuda, status):
    assert memory.check_locked_memory(pool, limit, is_cuda).status == status


@pytest.mark.parametrize(
    ("text", "status"),
    [("always [madvise] never", "ok"), ("always madvise [never]", "warning"), (None, "ok")],
)
def test_huge_pages(tmp_path, text, status):
    setting = tmp_path / "enabled"
    if text is not None:
        setting.write_text(text + "\n")
    assert memory.check_huge_pages(setting).status == status


def test_pinning_under_windows():
    assert memory.check_windows("6.1.0-21-amd64").status == "ok"
    assert memory.check_windows("5.15.90.1-microsoft-standard-WSL2").status == "warning"
    names = [finding.check for finding in memory.check_memory(None, is_cuda=True)]
    assert names[-1] == "Windows subsystem"


@pytest.mark.parametrize(
    ("here", "spawned", "message"),
    [
        (SEEN, SEEN, "also in a spawned process"),
        (SEEN | {"backend": None}, None, "unknown in the API server's process"),
        (SEEN, None, "unknown in a spawned process"),
        (SEEN, SEEN | {"connector": False}, "the KV connector is unknown in a spawned process"),
        (SEEN | {"refusal": "too old"}, SEEN, "too old"),
    ],
)
def test_what_vllm_sees(here, spawned, message):
    found = judge({"vllm": "0.32.0", "platform": "P", "here": here, "spawned": spawned})
    assert message in found.detail
    assert (found.status == "ok") == (spawned == here)


def test_a_program_that_fails_gives_its_last_line():
    with pytest.raises(ProgramError, match=r"No module named vllm_dhisparse\.nothing"):
        run_program("vllm_dhisparse.nothing")
    with pytest.raises(ProgramError, match=r"unexpected output: 0\."):
        run_json_program("vllm_dhisparse", "--version")


def test_the_exit_status_says_whether_there_are_errors(monkeypatch, capsys):
    findings = [ok("a", "fine"), warning("b", "odd", "mend b")]
    monkeypatch.setattr(command, "check_all", lambda size: findings)
    assert main(["doctor"]) == 0
    assert (
        "warning  b: odd\n         fix: mend b\n\n0 errors, 1 warnings" in capsys.readouterr().out
    )
    findings.append(error("c", "bad", "mend c"))
    assert main(["doctor", "--json"]) == 1


@pytest.mark.parametrize(
    "options", [["doctor", "--host-pool-gib", "0"], ["doctor", "--host-pool-gib", "inf"], ["x"], []]
)
def test_bad_options_exit_with_two(options):
    with pytest.raises(SystemExit, match="2"):
        main(options)

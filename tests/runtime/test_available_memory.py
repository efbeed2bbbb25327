import psutil
import pytest

from vllm_dhisparse.runtime.available_memory import available_bytes, group_memory


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "3000", "memory.current": "1000"}, 2000),
        ({"memory.max": "1000", "memory.current": "3000"}, 0),
        (
            {
                "memory/memory.limit_in_bytes": "500",
                "memory/memory.usage_in_bytes": "100",
            },
            400,
        ),
        (
            {
                "memory.max": "3000",
                "memory.current": "2900",
                "memory.stat": "anon 400\nfile 2500\ninactive_file 2000\n",
            },
            2100,
        ),
        (
            {
                "memory/memory.limit_in_bytes": "500",
                "memory/memory.usage_in_bytes": "400",
                "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 300\n",
            },
            400,
        ),
    ],
)
def test_the_limit_of_the_control_group_counts(tmp_path, files, expected):
    (tmp_path / "memory").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text + "\n")
    assert available_bytes(tmp_path) == expected


def test_without_a_limit_the_machine_counts(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("5\n")
    assert 0 < available_bytes(tmp_path) <= psutil.virtual_memory().total
    assert group_memory(tmp_path) is None

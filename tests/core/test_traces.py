import numpy as np
import pytest
from workloads import TRACES

from vllm_dhisparse.core.traces import Trace, read_trace, write_trace


def trace(**changes):
    positions = np.array([[[[0, 5]], [[4, -1]]], [[[6, 5]], [[1, 2]]]], dtype=np.int32)
    whole = Trace(positions, np.array([5, 6]), np.array([1, 1]), {"model": "m", "source": "s"})
    return whole._replace(**changes)


def test_what_is_written_is_read(tmp_path):
    for name, positions in (("small", trace().positions), ("large", trace().positions + 70_000)):
        wanted = trace(positions=positions, context=trace().context + positions.max())
        write_trace(tmp_path / f"{name}.npz", wanted)
        found = read_trace(tmp_path / f"{name}.npz")
        assert (found.positions == positions).all()
        assert found.context.tolist() == wanted.context.tolist()
        assert found.meta == {"model": "m", "source": "s"}
        assert found.top_k == 2


def test_a_stream_is_one_group_without_drafts():
    context, positions = trace().stream(1)
    assert context == 5
    assert positions.tolist() == [[4, -1], [1, 2]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": np.zeros((2, 1, 2), np.int32)}, "4 dimensions"),
        ({"context": np.array([5])}, r"context must be \[2\]"),
        ({"accepted": np.array([1, 2])}, "accepted must be from 1 to 1"),
        ({"context": np.array([4, 6])}, "after its own"),
    ],
)
def test_what_is_no_trace_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        write_trace(tmp_path / "bad.npz", trace(**changes))


def test_a_wrong_file_is_refused_with_its_name(tmp_path):
    np.savez(tmp_path / "other.npz", positions=np.zeros(3))
    with pytest.raises(ValueError, match=r"other.npz is not a trace .* no accepted"):
        read_trace(tmp_path / "other.npz")
    (tmp_path / "text.npz").write_text("no")
    with pytest.raises(ValueError, match=r"text.npz is not a trace"):
        read_trace(tmp_path / "text.npz")


def test_the_recorded_traces_are_traces():
    files = sorted(TRACES.glob("*.npz"))
    assert len(files) == 5
    for file in files:
        found = read_trace(file)
        assert found.positions.shape == (1024, 5, 1, 160)
        assert found.context[[0, -1]].tolist() == [7168, 8191]
        assert {"model", "source"} <= set(found.meta)

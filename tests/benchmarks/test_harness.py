import json
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parent / "run.sh"


def test_one_run_prints_and_writes_every_figure(tmp_path):
    target = tmp_path / "figures.json"
    command = ["bash", str(SCRIPT), "--tiny", "--json", str(target)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    content = json.loads(target.read_text())
    assert set(content) == {"machine", "figures"}
    assert content["machine"]["threads_used"] == 1
    names = [figure["name"] for figure in content["figures"]]
    assert len(set(names)) == len(names)
    for kind in ("resolve", "gather", "retrieve", "attend", "over stock managers"):
        assert any(kind in name for name in names), kind
    for figure in content["figures"]:
        assert list(figure) == ["name", "value", "unit", "baseline", "ratio"]
        assert figure["name"] in printed
        assert (figure["baseline"] is None) == (figure["ratio"] is None)
        assert isinstance(figure["value"], int | float)

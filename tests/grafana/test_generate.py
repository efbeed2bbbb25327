import generate
import metrics_table
import pytest


def test_an_old_file_is_found_and_written_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    file = tmp_path / "README.md"
    old = f"above\n{metrics_table.BEGIN}| old |\n{metrics_table.END}below\n"
    file.write_text(old)
    text = metrics_table.replaced(old)
    monkeypatch.setattr(generate, "wanted", lambda: {file: text})
    assert generate.main(["--check"]) == 1
    assert file.read_text() == old
    assert "README.md is not up to date" in capsys.readouterr().out
    assert generate.main([]) == 0
    assert file.read_text() == text
    assert generate.main(["--check"]) == 0
    assert text.startswith("above\n")
    assert text.endswith("below\n")
    assert "| old |" not in text


def test_a_document_without_the_marks_is_refused():
    with pytest.raises(ValueError, match="no table between"):
        metrics_table.replaced("# Title\n")

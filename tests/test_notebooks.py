"""Every notebook runs from top to bottom, and none carries outputs or the traces of a machine into the repository."""

import json
import runpy
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def test_there_are_five_in_order() -> None:
    assert [path.name[:3] for path in NOTEBOOKS] == ["01_", "02_", "03_", "04_", "05_"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_repository_holds_no_outputs_and_plain_metadata(path: Path) -> None:
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert notebook.metadata == METADATA
    for cell in notebook.cells:
        assert cell.metadata == {}, cell.id
        if cell.cell_type == "code":
            assert cell.outputs == [], cell.id
            assert cell.execution_count is None, cell.id


@pytest.mark.medium
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_from_top_to_bottom(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    notebook = nbformat.read(path, as_version=4)
    # A cell that raises ends the run with CellExecutionError.
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": path.parent}}
    ).execute()
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in code)
    outputs = [output for cell in code for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    figures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(figures) >= 1, "a notebook without a figure"


def test_record_of_a_run_has_its_start_and_the_chosen_metrics(tmp_path: Path) -> None:
    (tmp_path / "evaluations.jsonl").write_text('{"label": "start", "score": 1.5}\n{"label": "end", "score": 9.0}\n')
    metrics = {"iteration": 1, "val/score": 2.00004, "empo2/off/ess": 0.5, "empo2/off/clipfrac": 0.1, "timing_s/x": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    record = runpy.run_path(str(ROOT / "notebooks" / "record_dynamics.py"))
    assert list(map(json.loads, record["lines"]("empo2", 3, tmp_path))) == [
        {"arm": "empo2", "seed": 3, "iteration": 0, "val/score": 1.5},
        {"arm": "empo2", "seed": 3, "iteration": 1, "val/score": 2.0, "empo2/off/ess": 0.5},
    ]


def test_recording_begins_with_what_made_it(tmp_path: Path) -> None:
    record = runpy.run_path(str(ROOT / "notebooks" / "record_dynamics.py"))
    for name, commit in (("a", "111"), ("b", "222"), ("c", "111")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"commit": commit}))
    made = json.loads(record["head"](["python", "x y"], [tmp_path / name for name in "abc"]))
    assert made["command"] == "python 'x y'"
    assert made["commit"] == "111, 222"
    shipped = json.loads((ROOT / "notebooks" / "toy_dynamics.jsonl").read_text().splitlines()[0])
    assert shipped.keys() == made.keys()
    assert shipped["commit"]
    assert "dirty" not in shipped["commit"]

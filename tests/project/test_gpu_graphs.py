"""The benchmark of graphs for a GPU (`benchmarks.gpu_graphs`), with its measurements replaced."""

import json

from benchmarks import gpu, gpu_graphs

CHANGES = {"transposes": [0, 0], "sums": [0, 0], "channels_first": 0, "fused": 0, "swaps": 0}
LAYOUT = {"default": {**CHANGES, "transposes": [2, 3]}, "rewritten": CHANGES, "failure": ""}


def kernels(**changed):
    empty = {"missing": {}, "host_tensors": {}, "copies": {}}
    return {"ops": 1200, **empty, "small_to_host": 0, "small_to_gpu": 1, "swaps": 0, **changed}


def test_interrupted_check_of_graphs_goes_on_with_missing_steps(monkeypatch, tmp_path, capsys):
    names = []

    def run(case):
        names.append(case.name)
        return (
            {"failed": "no plan"}
            if case.plan == "strips"
            else {"kernels": kernels(missing={"Split int32": 2}), "layout": LAYOUT}
        )

    monkeypatch.setattr(gpu_graphs, "run", run)
    path = tmp_path / "graphs.json"
    arguments = ["--nets", "DenseNet121", "--results", str(path)]
    assert gpu_graphs.main(arguments) == 1
    assert names == [f"DenseNet121/float32/{plan}" for plan in gpu_graphs.PLANS]
    assert gpu_graphs.main(arguments) == 1 and names[len(gpu_graphs.PLANS) :] == ["DenseNet121/float32/strips"]
    assert f"3 of 4 steps measured; {path}" in capsys.readouterr().out
    (line,) = json.loads(path.read_text())["tables"]["kernels"].splitlines()[2:]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["DenseNet121", "float32", "1,200 / 1,200 / - / 1,200", "2 Split int32", "0", "0", "0", "1", "0"]


def test_graphs_of_every_case_are_named_once():
    names = [case.name for case in gpu_graphs.cases()]
    assert len(set(names)) == len(names) and {name.split("/")[0] for name in names} == set(gpu.NETWORKS)


def test_table_counts_the_most_of_each_op_over_plans():
    stored = {
        "vgg16/float32/original": {"kernels": kernels(copies={"Cast int32": 1})},
        "vgg16/float32/tiles": {"kernels": kernels(copies={"Cast int32": 3, "Equal bool": 1}, swaps=2)},
    }
    (line,) = gpu_graphs.kernel_table(stored).splitlines()[2:]
    assert "3 Cast int32, 1 Equal bool" in line and line.endswith("| 2     |")

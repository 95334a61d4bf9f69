"""`largebatch checkpoints` and `largebatch export`, on checkpoints of every strategy."""

import json
import os
import time

import numpy as np
import pytest

from jobs import run_job
from largebatch.__main__ import main
from paths import DIGITS
from resuming import TINY_GPT, assert_same_weights, run_interrupted
from saving import FakeRun, mark

TINY_DIGITS = ("--logging.trackers=[]", "--data.image_size=16", "--evaluation.max_samples=32")
LAST = "--train.stop_after_steps=5"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "run"
    words = (*TINY_GPT, LAST, '--checkpoint.every={"steps": 2}', "--checkpoint.keep_last=null")
    assert run_interrupted(folder, words, strategy="fsdp", world_size=3) is None
    return folder


@pytest.mark.slow
def test_lists_them(run_dir, capsys):
    assert main(["checkpoints", str(run_dir), "--verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["step_00000005", "5"],
        ["step_00000004", "4"],
        ["step_00000002", "2"],
    ]
    assert all("3 x fsdp, #1" in line and line.endswith("complete") for line in lines[1:])


@pytest.mark.slow
def test_names_what_is_broken(run_dir, capsys):
    file = run_dir / "checkpoints/step_00000005/rank_00001.safetensors"
    content = file.read_bytes()
    try:
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert main(["checkpoints", str(run_dir)]) == 0
        assert main(["checkpoints", str(run_dir), "--verify"]) == 1
        assert "rank_00001.safetensors has changed since it was written" in capsys.readouterr().out
        file.write_bytes(content[:-1])
        assert main(["checkpoints", str(run_dir)]) == 1
        assert f"has {len(content) - 1} bytes, but had {len(content)}" in capsys.readouterr().out
    finally:
        file.write_bytes(content)


@pytest.mark.parametrize("words", [["checkpoints", "nowhere"], ["checkpoints", "recipes"], ["export", "nowhere", "x"]])
def test_places_without_checkpoints(words, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("error: ")


def logits(*folders):
    """The logits of each model, and the kinds of numbers that its weights are."""
    import torch
    from transformers import AutoModelForCausalLM

    found = []
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder)
        values = model.eval()(torch.arange(16).view(1, 16)).logits.float().detach().numpy()
        found.append((values, {str(parameter.dtype) for parameter in model.parameters()}))
    return found


@pytest.mark.slow
def test_export_is_the_final_weights(tmp_path):
    run_dir = tmp_path / "run"
    assert run_interrupted(run_dir, (*TINY_DIGITS, LAST), strategy="fsdp", recipe=DIGITS) is None
    assert main(["export", str(run_dir), str(tmp_path / "out")]) == 0
    assert_same_weights(tmp_path / "out", run_dir / "model")
    mine, theirs = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "out", run_dir / "model"))
    assert mine == theirs


@pytest.mark.slow
def test_export_in_another_dtype_and_in_several_files(run_dir, tmp_path, monkeypatch):
    from largebatch.run.checkpoint import export

    assert main(["export", str(run_dir / "checkpoints/step_00000005"), str(tmp_path / "half"), "--dtype=bfloat16"]) == 0
    monkeypatch.setattr(export, "MAX_FILE_BYTES", 4000)
    manifest = export.export(run_dir, tmp_path / "pieces")
    assert manifest.step == 5
    assert len(list((tmp_path / "pieces").glob("model-*.safetensors"))) > 2
    folders = (run_dir / "model", tmp_path / "pieces", tmp_path / "half")
    ((whole, pieces, half), dtypes) = zip(*run_job(logits, *folders, strategy="single")[0], strict=True)
    assert dtypes == ({"torch.float32"}, {"torch.float32"}, {"torch.bfloat16"})
    np.testing.assert_array_equal(pieces, whole)
    np.testing.assert_allclose(half, whole, atol=0.01)


@pytest.mark.slow
def test_export_writes_over_nothing(run_dir, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    assert main(["export", str(run_dir), str(tmp_path / "out")]) == 2
    assert "already exists; name a new folder" in capsys.readouterr().err
    assert not list(tmp_path.glob(".*"))


def damaged(folder, **values):
    """A run with one checkpoint whose manifest has these values, and whose checksums fit."""
    path = FakeRun(folder).save(3)
    file = path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
    mark(path)
    return path


def test_terminals_are_not_given_orders(tmp_path, capsys):
    damaged(tmp_path / "run", strategy="\x1b[2Jddp")
    assert main(["checkpoints", str(tmp_path / "run")]) == 0
    assert "1 x \\x1b[2Jddp" in capsys.readouterr().out


def test_a_manifest_of_endless_shapes_is_refused_in_time(tmp_path, capsys):
    damaged(tmp_path / "run", parameters={"x": {"shape": [2**62] * 200_000, "scalars": {}}}, vectors={"weight/x": []})
    begun = time.process_time()
    assert main(["checkpoints", str(tmp_path / "run")]) == 1
    assert time.process_time() - begun < 5
    assert "cannot be used: its manifest.json is not readable: parameters.x.shape" in capsys.readouterr().out


@pytest.mark.parametrize("content", ["5", '"x"', "[]"])
def test_a_configuration_of_another_kind_is_refused(content, tmp_path, capsys):
    path = FakeRun(tmp_path / "run").save(3)
    (path / "model_config.json").write_text(content)
    mark(path)
    assert main(["export", str(path), str(tmp_path / "out")]) == 2
    assert "model_config.json is not an object" in capsys.readouterr().err


def test_files_that_are_no_files(tmp_path, capsys):
    """A pipe would be waited for, and a link may lead to a file that only the reader can read."""
    path = FakeRun(tmp_path / "run").save(3)
    (path / "complete.json").unlink()
    os.mkfifo(path / "complete.json")
    assert main(["checkpoints", str(tmp_path / "run")]) == 1
    assert "complete.json cannot be read" in capsys.readouterr().out
    assert main(["checkpoints", "x" * 5000]) == 2
    assert "error: " in capsys.readouterr().err

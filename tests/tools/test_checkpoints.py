"""`largebatch checkpoints` and `largebatch export`, on checkpoints of every strategy."""

import os
import time

import pytest
from transformers import AutoModelForCausalLM

from largebatch.run.checkpoint import export
from manifests import save_with_manifest
from resuming import TINY_GPT, run_interrupted
from saving import FakeRun, assert_same, mark

LAST = "--train.stop_after_steps=5"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "run"
    words = (*TINY_GPT, LAST, '--checkpoint.every={"steps": 2}', "--checkpoint.keep_last=null")
    assert run_interrupted(folder, words, strategy="fsdp", world_size=3) is None
    return folder


@pytest.mark.slow
def test_lists_them(run_dir, output_of):
    _, *lines = output_of("checkpoints", run_dir, "--verify").splitlines()
    assert [line.split()[:2] for line in lines] == [[f"step_0000000{step}", str(step)] for step in (5, 4, 2)]
    assert all("3 x fsdp, #1" in line and line.endswith("complete") for line in lines)


@pytest.mark.slow
def test_names_what_is_broken(run_dir, run_command, output_of):
    file = run_dir / "checkpoints/step_00000005/rank_00001.safetensors"
    content = file.read_bytes()
    try:
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        output_of("checkpoints", run_dir)
        code, output, _ = run_command("checkpoints", run_dir, "--verify")
        assert code == 1
        assert "rank_00001.safetensors has changed since it was written" in output
        file.write_bytes(content[:-1])
        code, output, _ = run_command("checkpoints", run_dir)
        assert code == 1
        assert f"has {len(content) - 1} bytes, but had {len(content)}" in output
    finally:
        file.write_bytes(content)


@pytest.mark.parametrize(
    "words",
    [["checkpoints", "nowhere"], ["checkpoints", "recipes"], ["checkpoints", "x" * 5000], ["export", "nowhere", "x"]],
)
def test_places_without_checkpoints(words, refusal_of):
    assert refusal_of(*words).startswith("error: ")


@pytest.mark.slow
def test_export_in_another_dtype_and_in_several_files(run_dir, tmp_path, monkeypatch, output_of):
    output_of("export", run_dir / "checkpoints/step_00000005", tmp_path / "half", "--dtype=bfloat16")
    monkeypatch.setattr(export, "MAX_FILE_BYTES", 4000)
    manifest = export.export(run_dir, tmp_path / "pieces")
    assert manifest.step == 5
    assert len(list((tmp_path / "pieces").glob("model-*.safetensors"))) > 2
    folders = (run_dir / "model", tmp_path / "pieces", tmp_path / "half")
    whole, pieces, half = (AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in folders)
    for name, weight in whole.items():
        assert_same(pieces[name], weight)
        assert_same(half[name], weight.bfloat16())


@pytest.mark.slow
def test_export_writes_over_nothing(run_dir, tmp_path, refusal_of):
    (tmp_path / "out").mkdir()
    assert "already exists; name a new folder" in refusal_of("export", run_dir, tmp_path / "out")
    assert not list(tmp_path.glob(".*"))


def test_terminals_are_not_given_orders(tmp_path, output_of):
    save_with_manifest(tmp_path, 3, strategy="\x1b[2Jddp")
    assert "1 x \\x1b[2Jddp" in output_of("checkpoints", tmp_path)


def test_a_manifest_of_endless_shapes_is_refused_in_time(tmp_path, run_command):
    parameters = {"x": {"shape": [2**62] * 200_000, "scalars": {}}}
    save_with_manifest(tmp_path, 3, parameters=parameters, vectors={"weight/x": []})
    begun = time.process_time()
    code, output, _ = run_command("checkpoints", tmp_path)
    assert time.process_time() - begun < 5
    assert code == 1
    assert "cannot be used: its manifest.json is not readable: parameters.x.shape" in output


@pytest.mark.parametrize("content", ["5", '"x"', "[]"])
def test_a_configuration_of_another_kind_is_refused(content, tmp_path, refusal_of):
    path = FakeRun(tmp_path / "run").save(3)
    (path / "model_config.json").write_text(content)
    mark(path)
    assert "model_config.json is not an object" in refusal_of("export", path, tmp_path / "out")


def test_files_that_are_no_files(tmp_path, run_command):
    """A pipe would be waited for, and a link may lead to a file that only the reader can read."""
    path = FakeRun(tmp_path / "run").save(3)
    (path / "complete.json").unlink()
    os.mkfifo(path / "complete.json")
    code, output, _ = run_command("checkpoints", tmp_path / "run")
    assert code == 1
    assert "complete.json cannot be read" in output

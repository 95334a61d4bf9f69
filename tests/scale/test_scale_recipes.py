"""bench/scale: the program from end to end."""

import json
import sys

import pytest

import scale


@pytest.mark.slow
def test_program(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["scale.py", str(tmp_path / "out")])
    monkeypatch.setattr(scale, "RECIPES", ("gpt2_124m",))
    scale.main()
    text = (tmp_path / "out/README.md").read_text()
    assert capsys.readouterr().out == text
    about = json.loads((tmp_path / "out/scale.json").read_text())
    assert {point["series"] for point in about["published"]} >= {"MPT-7B, H100", "ResNet-50, P100, Goyal et al."}
    recipe = about["recipes"]["gpt2_124m"]
    own, growing = (recipe[title] for title in ("the recipe's global batch", "one micro-batch per GPU"))
    # 2,048 samples are 16 for each of 128 GPUs.
    assert {point["gpus"] for point in own} == {8, 16, 32, 64, 128}
    assert {point["global_batch_size"] for point in own} == {2048}
    assert all(point["global_batch_size"] == 16 * point["gpus"] for point in growing)
    assert {point["strategy"] for point in own} >= {"ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"}
    assert all(0 < point["efficiency"]["least"] <= point["efficiency"]["most"] < 1 for point in own + growing)

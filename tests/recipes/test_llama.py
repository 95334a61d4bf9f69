"""What a Llama's section refuses."""

import pytest

from largebatch.config import load_config
from largebatch.errors import ConfigError
from paths import LLAMA, PYDOC


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--precision=fp64",), r'precision: "fp64" would not be fp64 throughout: Llama'),
        (("--model.num_heads=128",), r"hidden_size 128 is not a multiple of 2 x num_heads 128"),
        (("--model.num_kv_heads=3",), r"num_heads 4 is not a multiple of num_kv_heads 3"),
        (("--model.dropout=0.1",), r"model\.dropout"),
    ],
)
def test_refused(words, message):
    load_config(LLAMA)
    with pytest.raises(ConfigError, match=message):
        load_config(LLAMA, words)


def test_other_models_have_fp64_and_no_initial_weights():
    load_config(PYDOC, ["--precision=fp64"])
    with pytest.raises(ConfigError, match=r"model\.initial_weights"):
        load_config(PYDOC, ["--model.initial_weights=somewhere"])

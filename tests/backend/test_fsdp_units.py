"""Which modules FSDP shards together, by hand."""

import pytest
from torch import nn

from largebatch.backend.fsdp_units import fsdp_units


class Model(nn.Module):
    """Two blocks between an embedding and a norm with an output layer, which may be another of its modules."""

    _no_split_modules = ("Sequential",)

    def __init__(self, is_tied, output="output"):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 7)) for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.output = nn.Linear(4, 7, bias=False)
        self.name_of_output = output
        if is_tied:
            self.output.weight = self.embedding.weight

    def get_input_embeddings(self):
        return self.embedding

    def get_output_embeddings(self):
        return self.get_submodule(self.name_of_output)


@pytest.mark.parametrize(
    ("model", "inner", "tail"),
    [
        (Model(is_tied=False), ["embedding"], ["norm", "output"]),
        (Model(is_tied=True), [], ["norm", "embedding", "output"]),
        # The output layer is a part of a block, and is sharded with it.
        (Model(False, "blocks.1.1"), ["embedding"], ["norm"]),
    ],
)
def test_the_embedding_is_alone_or_with_the_output_layer_that_shares_its_weight(model, inner, tail):
    names = {module: name for name, module in model.named_modules()}
    units = [([names[module] for module in unit.modules], unit.gathered_once) for unit in fsdp_units(model)]
    blocks = [(["blocks.1"], False), (["blocks.0"], False)]
    assert units == [*blocks, *(([name], True) for name in inner), (tail, True), ([""], True)]

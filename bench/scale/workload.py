"""A recipe as the model needs it: parameters, layers, and the floating-point operations of a micro-batch."""

from dataclasses import dataclass
from pathlib import Path

from largebatch.config import load_config


@dataclass(frozen=True)
class Workload:
    """A language model's recipe."""

    params: int
    layers: int
    width: int
    tokens: int
    """Of a sample."""
    global_batch_size: int
    micro_batch_size: int

    @property
    def micro_batch_flop(self) -> float:
        """Forward and backward: 6 for each weight and token, and attention's 12 layers x width x tokens^2.

        llm-foundry's MFU, scripts/train/benchmarking/README.md; nothing is recomputed.
        """
        attention = 12 * self.layers * self.width * self.tokens**2
        return self.micro_batch_size * (6 * self.params * self.tokens + attention)


def read_workload(recipe: Path) -> Workload:
    """The workload of a recipe for causal_lm, whose models are GPT-2 and Llama.

    Raises:
        ValueError: It is of another task.
    """
    config = load_config(recipe)
    model = config.model
    if config.task != "causal_lm":
        raise ValueError(f"{recipe} is a recipe for {config.task}; give one for causal_lm")
    tokens, width, layers = config.data.block_size, model.hidden_size, model.num_layers
    if model.architecture == "gpt2":
        # Embeddings of tokens, which are the output's too, and of positions; attention's 4 and the perceptron's 8
        # squares with their biases; two norms a layer and one at the end.
        params = (model.vocab_size + tokens) * width + layers * (12 * width**2 + 13 * width) + 2 * width
    else:
        # Queries and output, keys and values, the perceptron's three matrices; two norms a layer and one at the end.
        keys = width * model.num_kv_heads // model.num_heads
        layer = 2 * width**2 + 2 * width * keys + 3 * width * model.intermediate_size + 2 * width
        params = model.vocab_size * width * (1 if model.tie_embeddings else 2) + layers * layer + width
    return Workload(params, layers, width, tokens, config.batch.global_batch_size, config.batch.micro_batch_size)

"""Pre-training of a masked language model with large batches: BERT with LAMB (You et al. 2019, arXiv 1904.00962).

bert_pydoc.json           a small BERT on the bytes of Python's own reference: a laptop's CPU, a minute
bert_large_64k_128.json   BERT-Large, blocks of 128 tokens at batch 65,536, the first 7,037 of the paper's 8,599 steps
bert_large_32k_512.json   its weights, blocks of 512 tokens at batch 32,768, the other 1,562; neither trained here

    accelerate launch --config_file recipes/accelerate_configs/ddp.yaml recipes/masked_lm/train.py \
        --config recipes/masked_lm/bert_pydoc.json
"""

from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForMaskedLM

from largebatch.config import MaskedLMConfig
from largebatch.data.masking import masked_sources
from largebatch.data.source import Batch
from largebatch.data.text import IGNORE_INDEX
from largebatch.initialization.attention import freeze_key_biases
from largebatch.memory.token_losses import return_token_losses
from largebatch.optim import build_optimizer
from largebatch.run import Run, Value, parse_command_line, user_errors


def build_model(config: MaskedLMConfig) -> BertForMaskedLM:
    """A BERT with random weights, without the prediction of the next sentence."""
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=config.model.vocab_size,
            max_position_embeddings=config.model.max_positions,
            hidden_size=config.model.hidden_size,
            intermediate_size=4 * config.model.hidden_size,
            num_hidden_layers=config.model.num_layers,
            num_attention_heads=config.model.num_heads,
            hidden_dropout_prob=config.model.dropout,
            attention_probs_dropout_prob=config.model.dropout,
            initializer_range=config.model.initializer_range,
            # Blocks have no padding; an embedding of it would be kept at zero.
            pad_token_id=None,
        )
    )
    freeze_key_biases(model)
    return model


def main() -> None:
    config, options = parse_command_line(MaskedLMConfig)
    run = Run(config, options)
    train_set, eval_set = run.load(masked_sources)

    model = run.build(build_model)
    # Cross-entropy in the output layer, chunk by chunk: logits would be the largest tensor of all.
    return_token_losses(model)
    optimizer = build_optimizer(model, run.plan)
    model, optimizer = run.prepare(model, optimizer)

    def evaluate_batch(batch: Batch) -> dict[str, Value]:
        # Logits here, which say what the likeliest tokens are.
        logits, labels = model(input_ids=batch["input_ids"]).logits.to(run.dtype), batch["labels"]
        losses = cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORE_INDEX, reduction="none")
        # Means over the predicted tokens: each sample's sum, and how many they are.
        num_predicted = (labels != IGNORE_INDEX).sum(dim=1)
        num_right = (logits.argmax(dim=-1) == labels).sum(dim=1)
        return {"loss": (losses.sum(dim=1), num_predicted), "accuracy": (num_right, num_predicted)}

    for step in run.steps(train_set):
        for batch in step.micro_batches():
            # A sum: the library divides by the predicted tokens of the whole global batch.
            step.backward(model(input_ids=batch["input_ids"], targets=batch["labels"]).sum())
        run.update(step)
        if run.should_evaluate:
            run.evaluate(eval_set, evaluate_batch)
    run.finish()


if __name__ == "__main__":
    with user_errors():
        main()

"""Pre-training of a causal language model with large batches.

gpt_pydoc.json   a small GPT on the bytes of Python's own reference: a laptop's CPU, a minute, 2.2 nats per byte
gpt2_124m.json   GPT-2 124M on 10B tokens of FineWeb at batch 2M tokens, AdamW with the square-root rule; the base
                 learning rate is the one commonly used at 0.5M tokens, where validation loss 3.28 is expected; 8 GPUs
llama_pydoc.json a small Llama on the same bytes, 1.53 nats per byte; its large sisters start as it does
llama_1b.json    Llama 1B on 26B tokens of FineWeb-Edu at batch 2M tokens, after TinyLlama (2401.02385); 64 GPUs
llama_8b.json    Llama 8B on 168B tokens at batch 4M tokens, after Llama 3 (2407.21783); 128 GPUs; neither trained here

    accelerate launch --config_file recipes/accelerate_configs/ddp.yaml recipes/causal_lm/train.py \
        --config recipes/causal_lm/gpt_pydoc.json
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from largebatch.config import CausalLMConfig
from largebatch.config.models import Llama
from largebatch.data.source import Batch
from largebatch.data.text import IGNORE_INDEX, text_sources
from largebatch.memory.token_losses import return_token_losses
from largebatch.optim import build_optimizer
from largebatch.run import Run, Value, parse_command_line, user_errors


def build_model(config: CausalLMConfig) -> GPT2LMHeadModel | LlamaForCausalLM:
    """A GPT-2 or a Llama with random weights."""
    if isinstance(config.model, Llama):
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=config.model.vocab_size,
                max_position_embeddings=config.data.block_size,
                hidden_size=config.model.hidden_size,
                intermediate_size=config.model.intermediate_size,
                num_hidden_layers=config.model.num_layers,
                num_attention_heads=config.model.num_heads,
                num_key_value_heads=config.model.num_kv_heads,
                rope_parameters={"rope_type": "default", "rope_theta": config.model.rope_theta},
                rms_norm_eps=config.model.norm_eps,
                tie_word_embeddings=config.model.tie_embeddings,
                initializer_range=config.model.initializer_range,
                use_cache=False,
                bos_token_id=None,
                eos_token_id=None,
            )
        )
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=config.model.vocab_size,
            n_positions=config.data.block_size,
            n_embd=config.model.hidden_size,
            n_layer=config.model.num_layers,
            n_head=config.model.num_heads,
            embd_pdrop=config.model.dropout,
            attn_pdrop=config.model.dropout,
            resid_pdrop=config.model.dropout,
            initializer_range=config.model.initializer_range,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def main() -> None:
    config, options = parse_command_line(CausalLMConfig)
    run = Run(config, options)
    train_set, eval_set = run.load(text_sources)

    model = run.build(build_model)
    # Cross-entropy in the output layer, chunk by chunk: logits would be the largest tensor of all.
    return_token_losses(model)
    optimizer = build_optimizer(model, run.plan)
    model, optimizer = run.prepare(model, optimizer)

    def token_losses(batch: Batch) -> torch.Tensor:
        """Loss of each target token, zero where a label is `IGNORE_INDEX`; shape (batch, tokens)."""
        # Positions are given where documents of a block are kept apart.
        return model(input_ids=batch["input_ids"], position_ids=batch.get("position_ids"), targets=batch["labels"])

    def evaluate_batch(batch: Batch) -> dict[str, Value]:
        targets = batch["labels"] != IGNORE_INDEX
        # A mean over tokens: each sample's sum of losses, and how many they are.
        return {"loss": (token_losses(batch).sum(dim=1), targets.sum(dim=1))}

    for step in run.steps(train_set):
        for batch in step.micro_batches():
            # A sum: the library divides by the target tokens of the whole global batch.
            step.backward(token_losses(batch).sum())
        run.update(step)
        if run.should_evaluate:
            run.evaluate(eval_set, evaluate_batch)
    run.finish()


if __name__ == "__main__":
    with user_errors():
        main()

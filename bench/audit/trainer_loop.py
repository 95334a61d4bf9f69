"""Transformers' Trainer on a causal language model whose samples have unequal numbers of targets."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Texts(torch.utils.data.Dataset):
    def __init__(self, indices):
        self.indices = indices

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, position):
        index = self.indices[position]
        tokens = torch.randint(40, (12,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        labels[: index % 7] = -100
        return {"input_ids": tokens, "labels": labels}


def train(indices, micro_batch_size, accumulation, **settings):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=12, n_embd=16, n_layer=1, n_head=2))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=micro_batch_size,
            gradient_accumulation_steps=accumulation,
            num_train_epochs=1,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            train_sampling_strategy="sequential",
            **settings,
        )
        trainer = Trainer(model, arguments, train_dataset=Texts(indices))
        trainer.train()
    return trainer.model_wrapped


def audit(indices, micro_batch_size, accumulation):
    return train(indices, micro_batch_size, accumulation)


def without_average_tokens(indices, micro_batch_size, accumulation):
    return train(indices, micro_batch_size, accumulation, average_tokens_across_devices=False)

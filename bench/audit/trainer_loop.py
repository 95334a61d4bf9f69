"""Transformers' Trainer and TRL's SFTTrainer on texts with unequal numbers of targets."""

import tempfile

import torch
from common import audited
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

WORDS = 40


def text(index):
    tokens = torch.randint(2, WORDS, (12,), generator=torch.Generator().manual_seed(index)).tolist()
    return {"input_ids": tokens, "labels": [-100] * (index % 7) + tokens[index % 7 :]}


class OwnLoss(GPT2LMHeadModel):
    """A model that does not ask for the number of targets of the whole batch."""

    def forward(self, input_ids, attention_mask, labels):
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


OF_TRANSFORMERS = (TrainingArguments, Trainer)


def train(indices, micro_batch_size, accumulation, model_class=GPT2LMHeadModel, of=OF_TRANSFORMERS, **settings):
    arguments_class, trainer_class = of
    model = model_class(GPT2Config(vocab_size=WORDS, n_positions=12, n_embd=16, n_layer=1, n_head=2))
    vocabulary = {"<pad>": 0, "<end>": 1} | {str(number): number for number in range(2, WORDS)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    arguments = arguments_class(
        tempfile.mkdtemp(),
        per_device_train_batch_size=micro_batch_size,
        gradient_accumulation_steps=accumulation,
        num_train_epochs=1,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        **settings,
    )
    trainer = trainer_class(
        model,
        arguments,
        train_dataset=Dataset.from_list([text(index) for index in indices]),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>"),
    )
    trainer.train()
    return trainer.model_wrapped


audit = audited(train)
without_average_tokens = audited(train, average_tokens_across_devices=False)
own_loss = audited(train, OwnLoss)
sft = audited(train, of=(SFTConfig, SFTTrainer))

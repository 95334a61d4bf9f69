"""Transformers' `Trainer` with its own settings for the same: bf16, `torch_compile`, a fused optimizer."""

import tempfile

from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from peers.throughput.job import build_optimizer, mean_loss


class WithLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, **batch):
        return {"loss": mean_loss(self.model, batch)}


class Timed(TrainerCallback):
    def __init__(self, clock):
        self.clock = clock

    def on_step_end(self, *_, **__):
        self.clock.step()


def train(clock, job):
    model = WithLoss(job.model)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=job.device.type == "cpu",
            bf16=True,
            torch_compile=True,
            torch_compile_backend=job.compile_backend,
            per_device_train_batch_size=job.micro_batch_size,
            gradient_accumulation_steps=job.accumulation,
            max_grad_norm=job.clip_norm or 0.0,
            max_steps=10**6,
            logging_steps=10,
            save_strategy="no",
            report_to=["tensorboard"],
            remove_unused_columns=False,
            dataloader_drop_last=True,
            dataloader_num_workers=4 if job.device.type == "cuda" else 0,
        )
        optimizers = (build_optimizer(model, job.optimizer), None)
        trainer = Trainer(
            model=model, args=arguments, train_dataset=job.samples, callbacks=[Timed(clock)], optimizers=optimizers
        )
        trainer.train()

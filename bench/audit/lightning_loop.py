"""Lightning's Trainer on a module whose training step returns a mean."""

import os

import lightning
import torch
from common import IGNORED, audited, network, samples
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self, ignored):
        super().__init__()
        self.ignored = ignored
        self.network = network()

    def training_step(self, batch, _):
        inputs, targets = batch
        return nn.functional.cross_entropy(self.network(inputs), targets, ignore_index=self.ignored)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def train(indices, micro_batch_size, accumulation, ignored=-100):
    module = Module(ignored)
    trainer = lightning.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=int(os.environ["WORLD_SIZE"]),
        plugins=[TorchElasticEnvironment()],
        max_epochs=1,
        accumulate_grad_batches=accumulation,
        gradient_clip_val=0.5,
        precision="64-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(samples(indices), micro_batch_size))
    return module


audit = audited(train)
unequal_targets = audited(train, ignored=IGNORED)

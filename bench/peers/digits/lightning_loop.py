"""Lightning's `Trainer`, with a line for TensorBoard every ten steps; no checkpoints, no progress bar."""

import tempfile

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from peers.digits.job import BATCH, EPOCHS, STEPS, digits, perceptron


class Digits(LightningModule):
    def __init__(self, clock):
        super().__init__()
        self.network = perceptron()
        self.clock = clock

    def training_step(self, batch, _):
        pixels, labels = batch
        loss = cross_entropy(self.network(pixels), labels)
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *_):
        self.clock.step()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train(clock):
    loader = DataLoader(TensorDataset(*digits()), batch_size=BATCH, shuffle=True, drop_last=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=EPOCHS,
            logger=TensorBoardLogger(folder),
            log_every_n_steps=10,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Digits(clock), loader)

"""`largebatch export`: a checkpoint's weights for `from_pretrained`."""

import argparse
from pathlib import Path

from largebatch.run.checkpoint.export import export

EPILOG = """examples:
  largebatch export runs/gpt_pydoc gpt_pydoc
  largebatch export runs/gpt_pydoc/checkpoints/step_00000200 gpt_pydoc --dtype bfloat16
  largebatch export runs/vit_digits vit_digits --ema
  largebatch export runs/sft_qwen_7b_lora sft_qwen_7b --merge --dtype bfloat16"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint, or of a run with intact checkpoints")
    parser.add_argument("out", type=Path, help="the folder to create")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16", "float64"], help="default: as trained")
    parser.add_argument("--ema", action="store_true", help="write the averaged weights, of optimizer.ema_half_life")
    parser.add_argument("--merge", action="store_true", help="write one model with the adapters (LoRA) in its weights")


def run(options: argparse.Namespace) -> int:
    """Write the weights of a checkpoint, of any strategy and number of processes, as safetensors with the model's
    config, for from_pretrained. Only one parameter is in memory at a time, or all with --merge.
    """
    manifest = export(options.checkpoint, options.out, options.dtype, options.ema, options.merge)
    print(f"the {'averaged ' if options.ema else ''}weights after step {manifest.step:,} are in {options.out}")
    return 0

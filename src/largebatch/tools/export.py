"""`largebatch export`: a checkpoint's weights for `from_pretrained`."""

import argparse
from pathlib import Path

from largebatch.run.checkpoint.export import export
from largebatch.tools.options import Commands, add_command


def add_parser(commands: Commands) -> None:
    parser = add_command(
        commands,
        "export",
        run,
        description="Write the weights of a checkpoint, of any strategy and number of processes, as safetensors with "
        "the model's config, for from_pretrained. Only one parameter is in memory at a time.",
        epilog="""examples:
  largebatch export runs/gpt_pydoc gpt_pydoc
  largebatch export runs/gpt_pydoc/checkpoints/step_00000200 gpt_pydoc --dtype bfloat16""",
    )
    parser.add_argument("checkpoint", type=Path, help="folder of a checkpoint, or of a run with intact checkpoints")
    parser.add_argument("out", type=Path, help="the folder to create")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16", "float64"], help="default: as trained")


def run(options: argparse.Namespace) -> int:
    """Write the weights and say where they are."""
    manifest = export(options.checkpoint, options.out, options.dtype)
    print(f"the weights after step {manifest.step:,} are in {options.out}")
    return 0

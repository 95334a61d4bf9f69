"""Where things are in the repository."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
RECIPES = sorted(path for path in ROOT.glob("recipes/*/*.json"))
STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
DIGITS = ROOT / "recipes/image_classification/resnet_digits.json"
IMAGENET = ROOT / "recipes/image_classification/resnet50_imagenet_8k.json"
ADDITION = ROOT / "recipes/sft/sft_addition.json"
PYDOC = ROOT / "recipes/causal_lm/gpt_pydoc.json"

"""Where things are in the repository."""

from pathlib import Path

from largebatch.plan import strategies
from largebatch.task_folders import recipes_in

ROOT = Path(__file__).parent.parent
RECIPES = recipes_in(ROOT / "recipes")
STRATEGIES = tuple(strategies.STRATEGIES)
ACCELERATE_CONFIGS = {name: ROOT / f"recipes/accelerate_configs/{name}.yaml" for name in STRATEGIES}
DIGITS = ROOT / "recipes/image_classification/resnet_digits.json"
CIFAR = ROOT / "recipes/image_classification/resnet_cifar10.json"
IMAGENET = ROOT / "recipes/image_classification/resnet50_imagenet_8k.json"
ADDITION = ROOT / "recipes/sft/sft_addition.json"
PYDOC = ROOT / "recipes/causal_lm/gpt_pydoc.json"
VIT_DIGITS = ROOT / "recipes/image_classification/vit_digits.json"
LLAMA = ROOT / "recipes/causal_lm/llama_pydoc.json"
BERT = ROOT / "recipes/masked_lm/bert_pydoc.json"
# Imports little: a job of it is all launch.
MAPS = ROOT / "tests/outside_task/maps.json"
SIMCLR = ROOT / "recipes/contrastive/simclr_digits.json"
CLIP_DIGITS = ROOT / "recipes/two_towers/clip_digits.json"
EMBED_PYDOC = ROOT / "recipes/two_towers/embed_pydoc.json"
CLIP_B32 = ROOT / "recipes/two_towers/clip_b32_32k.json"
CLIP_RN50 = ROOT / "recipes/two_towers/clip_rn50_cc12m.json"

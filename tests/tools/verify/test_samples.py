"""Sources whose samples or weights depend on what is fetched with them are told from a training's other mistakes."""

import shutil
from pathlib import Path

import pytest

from largebatch.tools.verify.samples import fault_of_samples
from paths import MAPS, ROOT, VIT_DIGITS
from planting import plant

MIRROR = 'derive_seed(self.config.seed, "mirror", epoch, index) % 2'
NUMBER = "met = vars(self).setdefault('met', [])\n        met.append(index)\n        number = met.index(index)"
RIGHT = [MAPS, *(ROOT / f"recipes/{name}.json" for name in ("contrastive/simclr_digits", "two_towers/clip_digits"))]


@pytest.mark.parametrize("recipe", RIGHT, ids=lambda recipe: recipe.stem)
def test_right_sources_have_no_fault(recipe):
    assert fault_of_samples(recipe, [], recipe.parent) is None


@pytest.mark.parametrize("size", [2, 6])
def test_samples_may_be_mixed_in_pairs_of_a_micro_batch(size):
    overrides = ["--loss.mixup_alpha=0.2", f"--batch.micro_batch_size={size}", "--batch.global_batch_size=24"]
    assert fault_of_samples(VIT_DIGITS, overrides, VIT_DIGITS.parent) is None


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        # By the place in the micro-batch, and by what was drawn before.
        ("self._one(int(index), epoch) for index in indices", "self._one(n, epoch) for n, _ in enumerate(indices)", ""),
        (MIRROR, "np.random.random() < 0.5", ""),
        # By the sample before it, around the end.
        (
            "self._one(int(index), epoch) for index in indices",
            "self._one(int(index), epoch) for index in np.roll(indices, 1)",
            "",
        ),
        # In the order in which a source has met its samples.
        ("return torch.tensor(values.copy(),", f"{NUMBER}\n        return number + torch.tensor(values.copy(),", ""),
        ('return batch["weights"]', 'return 400 + batch["weights"].long().sum()', "`weight` in data.py counts "),
    ],
)
def test_what_depends_on_other_samples_is_told(old, new, said, tmp_path, monkeypatch):
    task = Path(shutil.copytree(MAPS.parent, tmp_path / "maps", ignore=shutil.ignore_patterns("__pycache__")))
    monkeypatch.chdir(task)
    plant("data.py", old, new)
    fault = fault_of_samples(task / MAPS.name, [], task)
    assert fault.startswith(said or "`fetch` in data.py returns another 'map' of a sample when it is called again")

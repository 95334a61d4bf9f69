"""Whether a change of the code left training as it was, to the last bit.

    python bench/same_bits.py BEFORE --json before.json
    python bench/same_bits.py AFTER --json after.json --against before.json

Each small recipe trains for 50 steps with DDP and with FSDP2 on two CPU processes in a checkout that has its own .venv,
and one run is killed and resumed. Every logged loss and gradient norm, and the bytes of the final weights, must be
equal. Equal bits can be expected on one machine with the same versions of all libraries only.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors import safe_open

from largebatch.storage.files import read_json_lines
from record import take_facts

STEPS = 50
KILLED_AFTER = 27  # no checkpoint is written at this step, so that steps are repeated
RECIPES = [
    "causal_lm/gpt_pydoc",
    "causal_lm/llama_pydoc",
    "contrastive/simclr_digits",
    "image_classification/resnet_digits",
    "image_classification/vit_digits",
    "masked_lm/bert_pydoc",
    "sft/sft_addition",
]
STRATEGIES = ["ddp", "fsdp"]
KILLED = ("image_classification/resnet_digits", "fsdp")


def command_of(checkout: Path, recipe: str, strategy: str, folder: Path) -> list[str]:
    """The launch of a recipe on two CPU processes, with a checkpoint every 10 steps."""
    accelerate = ["--config_file", f"recipes/accelerate_configs/{strategy}.yaml", "--num_processes", "2"]
    return [
        str(checkout / ".venv/bin/accelerate"),
        "launch",
        *accelerate,
        f"recipes/{recipe.partition('/')[0]}/train.py",
        "--config",
        f"recipes/{recipe}.json",
        "--run-dir",
        str(folder),
        "--train.stop_after_steps",
        str(STEPS),
        "--logging.every",
        "1",
        "--checkpoint.every",
        '{"steps": 10}',
    ]


def train(checkout: Path, recipe: str, strategy: str, folder: Path) -> None:
    """Train to the last step."""
    command = command_of(checkout, recipe, strategy, folder)
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{recipe} with {strategy} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def train_and_kill(checkout: Path, recipe: str, strategy: str, folder: Path) -> None:
    """Train until a step is logged, and end all processes at once."""
    command = command_of(checkout, recipe, strategy, folder)
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=checkout, start_new_session=True, stdout=log, stderr=log)
        while not any(line["step"] >= KILLED_AFTER for line in read_json_lines(folder / "metrics.jsonl")):
            if process.poll() is not None:
                sys.exit(f"the run to be killed ended by itself, with {process.returncode}")
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def numbers_of(folder: Path) -> dict[str, Any]:
    """Losses and norms by step, as they were logged, and a digest of the final weights by name."""
    steps = {line["step"]: [line["loss"], line.get("grad_norm")] for line in read_json_lines(folder / "metrics.jsonl")}
    weights = {}
    for file in sorted((folder / "model").glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in sorted(opened.keys()):
                tensor = opened.get_tensor(name)
                digest = sha256(tensor.contiguous().view(-1).numpy().tobytes())
                weights[name] = f"{tensor.dtype} {list(tensor.shape)} {digest.hexdigest()}"
    evaluations = {line["step"]: line.get("loss") for line in read_json_lines(folder / "evaluations.jsonl")}
    return {"steps": steps, "evaluations": evaluations, "weights": weights}


def measure(checkout: Path) -> dict[str, Any]:
    """The numbers of all runs by recipe and strategy."""
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for recipe in RECIPES:
            for strategy in STRATEGIES:
                folder = Path(scratch, recipe, strategy)
                train(checkout, recipe, strategy, folder)
                found[f"{recipe} {strategy}"] = numbers_of(folder)
                print(f"{recipe} {strategy}: loss {found[f'{recipe} {strategy}']['steps'][STEPS][0]!r}", flush=True)
        folder = Path(scratch, "killed")
        train_and_kill(checkout, *KILLED, folder)
        train(checkout, *KILLED, folder)
        found[f"{' '.join(KILLED)} killed and resumed"] = numbers_of(folder)
    # As JSON has them: the names of an object are texts.
    return json.loads(json.dumps(found))


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """A line for each run whose numbers are not equal."""
    wrong = [f"{run}: not in both" for run in before.keys() ^ after.keys()]
    for run in before.keys() & after.keys():
        for what in ("steps", "evaluations", "weights"):
            one = before[run][what]
            other = after[run][what]
            different = [key for key in one.keys() | other.keys() if one.get(key) != other.get(key)]
            if different:
                wrong.append(f"{run}: {len(different)} of {len(one)} {what} differ, such as {min(different)}")
    return sorted(wrong)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="folder of a checkout with a .venv of its own")
    parser.add_argument("--json", type=Path, required=True, help="where to write the numbers")
    parser.add_argument("--against", type=Path, help="numbers of another checkout, which these must be equal to")
    options = parser.parse_args()
    checkout = options.checkout.resolve()
    facts = take_facts(["torch", "accelerate", "transformers"])
    commit = subprocess.check_output(["git", "-C", checkout, "rev-parse", "--short", "HEAD"], text=True).strip()
    os.environ["OMP_NUM_THREADS"] = "1"
    runs = measure(checkout)
    wrong = []
    whole, killed = (runs[f"{' '.join(KILLED)}{which}"] for which in ("", " killed and resumed"))
    if whole != killed:
        wrong.append("the run that was killed and resumed differs from the one that was not")
    if options.against:
        wrong += differences(json.loads(options.against.read_text(encoding="utf-8"))["runs"], runs)
    written = {"facts": facts | {"commit": commit}, "runs": runs}
    options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print("\n".join(wrong) or f"{len(runs)} runs: all numbers are equal")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

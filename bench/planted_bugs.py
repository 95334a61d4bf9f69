"""The bugs that `planted.py` plants: what is edited, and what `largebatch verify` must say of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paths import MAPS, RECIPES

AGREES = "combinations agree with one process"


@dataclass(frozen=True)
class Planted:
    """A bug, and what must be said of it.

    Args:
        name: What is wrong.
        said: A part of the output that names the cause.
        edits: The file, what is replaced, and by what; none must agree.
        recipe: The recipe whose task gets it.
        words: Options and overrides of `verify` besides those of all.
    """

    name: str
    said: str
    edits: Sequence[tuple[str, str, str]] = ()
    recipe: Path = MAPS
    words: Sequence[str] = ("--strategies=ddp,zero1", "--world-sizes=2", "--no-resume")


ONE_AND_TWO = ("--strategies=ddp", "--world-sizes=1,2", "--micro-batch-sizes=2", "--no-resume")
ONE_AND_TWO_OF_ANY = ("--strategies=ddp", "--world-sizes=1,2", "--no-resume")
RESUMED = ("--strategies=ddp", "--world-sizes=2", "--micro-batch-sizes=2")
STEP = 'weight.sub_(group["lr"] * direction / (direction.abs() + group["softness"]))'
BACKWARD = "step.backward(losses(batch).sum())"
UPDATE = "        run.update(step)\n"
WEIGHTS = "model.parameters()"
CLAMP = "lambda gradient: gradient.clamp(-1e-3, 1e-3)"
NOISE = "random.normal(0, 0.5, (side, side))"
OF_THIS_PROCESS = 'np.random.default_rng([index, int(__import__("os").environ.get("RANK", 0))])'
MODEL_END = "return nn.Sequential(*layers, "
MASK = """class Mask(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, values):
        return values * 2 * (torch.rand(values.shape, generator=self.generator) < 0.5) if self.training else values


"""
ALL_REDUCE = "torch.distributed.is_initialized() and torch.distributed.all_reduce(loss.detach())"
IMPORT_TORCH = ("train.py", "from torch.nn.functional", "import torch\nfrom torch.nn.functional")
IS_LATER = '(__import__("os").environ.get("RANK", "0") == "1")'
SOMETIMES = """class Sometimes(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, values):
        return self.layer(values) * self.scale if values.flatten()[0] > 0 else self.layer(values)


"""
NOT_KEPT = "training depends on something that checkpoints do not have, such as an average in train.py"
BY_MICRO_BATCH = "the first loss differs for other micro-batch sizes only: samples that share a micro-batch change"
BY_PROCESS = "several processes differ where one does not, from the first loss on: data or noise depends on the process"
OF_SAMPLES = "`fetch` in data.py returns another "
IN_EVALUATION = "only evaluations differ: their values are means over the micro-batch"
BESIDE_UPDATE = "after step.backward; run.update clips, steps and clears gradients"
OF_A_PIECE = "the optimizer takes a norm, a mean or a maximum of such a piece for that of a parameter"
UNSEEDED = "random numbers that do not follow from the recipe's seed"

OF_OPTIMIZERS = (
    Planted(
        "an optimizer ignores weight_decay",
        "ignores the weight_decay 0.1 of a group",
        [("softsign.py", 'weight.mul_(1 - group["lr"] * group["weight_decay"])', "pass")],
    ),
    Planted(
        "an optimizer ignores the learning rate",
        "twice the rate does not make steps twice as long",
        [("softsign.py", STEP, STEP.replace('group["lr"]', "1e-3"))],
    ),
    Planted(
        "an optimizer decays biases and norms",
        "with a gradient of 0 in a group whose weight_decay is 0",
        [("softsign.py", '* group["weight_decay"]', "* 0.1")],
    ),
    Planted(
        "an optimizer counts steps in self",
        "has state outside of `optimizer.state`",
        [
            (
                "softsign.py",
                'direction = average / (1 - beta ** state["step"])',
                'self.t = getattr(self, "t", 0) + 1\n                    direction = average / (1 - beta**self.t)',
            )
        ],
    ),
    Planted(
        "an optimizer keeps gradients in self",
        "has state outside of `optimizer.state`",
        [
            ("softsign.py", STEP, STEP.replace("direction /", "damping * direction /")),
            (
                "softsign.py",
                "                if beta:",
                "                self.kept = getattr(self, 'kept', {})\n"
                "                last, earlier = self.kept.get(parameter, (direction, direction))\n"
                "                self.kept[parameter] = direction.clone(), last\n"
                "                damping = 1 - 0.5 * (last * earlier < 0)\n"
                "                if beta:",
            ),
        ],
        words=RESUMED,
    ),
    Planted(
        "an optimizer's module is missing",
        "softsing",
        [("config.py", ".softsign:Softsign", ".softsing:Softsign")],
    ),
    Planted(
        "an optimizer does not know its argument",
        "cannot be built by",
        [("softsign.py", "lr, beta, softness, weight", "lr, beta, soft, weight")],
    ),
    Planted(
        "an optimizer divides by the norm of a shard",
        "depends on how strategies divide a tensor",
        [("softsign.py", "(direction.abs() +", "(direction.norm() +")],
    ),
)
OF_TASKS = (
    Planted(
        "a loss is a mean over the micro-batch",
        "differ by one factor for other micro-batch sizes only: the loss is a mean",
        [("train.py", BACKWARD, BACKWARD.replace("sum", "mean"))],
    ),
    Planted(
        "an evaluation is a mean over the batch",
        IN_EVALUATION,
        [
            (
                "train.py",
                '(losses(batch).sum(dim=(1, 2)), batch["weights"].sum(dim=(1, 2)))',
                '(losses(batch).sum() / batch["weights"].sum()).expand(len(batch["map"]))',
            )
        ],
    ),
    Planted(
        "dropout that the config does not declare",
        BY_MICRO_BATCH,
        [("model.py", MODEL_END, f"{MODEL_END}nn.Dropout(0.3), ")],
    ),
    Planted(
        "BatchNorm that the config does not declare",
        "uses_batch_norm",
        [("model.py", MODEL_END, f"{MODEL_END}nn.BatchNorm2d(config.model.channels[-1]), ")],
    ),
    Planted(
        "a loss is divided by the number of processes",
        "by one factor in the first loss and its gradient: the loss is multiplied or divided by something",
        [("train.py", BACKWARD, "step.backward(losses(batch).sum() / run.plan.world_size)")],
        words=ONE_AND_TWO,
    ),
    Planted(
        "data are drawn with a seed that depends on the rank",
        "`fetch` in data.py returns another 'map' of the training samples than on rank 0",
        [
            ("data.py", NOISE, NOISE.replace("random", "of_this_process")),
            ("data.py", "\n        values =", f"\n        of_this_process = {OF_THIS_PROCESS}\n        values ="),
        ],
        words=ONE_AND_TWO,
    ),
    Planted(
        "augmentation draws from NumPy's own generator",
        OF_SAMPLES,
        [
            ("data.py", 'derive_seed(self.config.seed, "mirror", epoch, index) % 2', "np.random.random() < 0.5"),
            (
                "data.py",
                "def sources(config: Config, _):\n",
                "def sources(config: Config, _):\n    np.random.seed(config.seed)\n",
            ),
        ],
    ),
    Planted(
        "samples are drawn by their places in a micro-batch",
        OF_SAMPLES,
        [("data.py", "int(index), epoch) for index in indices", "place, epoch) for place, _ in enumerate(indices)")],
    ),
    Planted(
        "a weight counts padding",
        "`weight` in data.py counts ",
        [("data.py", 'return batch["weights"]', 'return 400 + batch["weights"].long().sum()')],
    ),
    Planted(
        "a mask of dropout from a generator of its own",
        BY_PROCESS,
        [
            ("model.py", MODEL_END, f"{MODEL_END}Mask(), "),
            ("model.py", "def build_model", f"{MASK}def build_model"),
        ],
        words=("--strategies=ddp,fsdp", "--world-sizes=1,2", "--no-resume"),
    ),
    Planted(
        "a running average of micro-batches",
        "something is kept from one micro-batch to the next (a running average",
        [
            (
                "train.py",
                BACKWARD,
                "loss = losses(batch).sum()\n            average = 0.9 * average + 0.1 * loss.detach()\n            "
                "step.backward(loss / average)",
            ),
            ("train.py", "    for step in run", "    average = 1.0\n    for step in run"),
        ],
        words=ONE_AND_TWO_OF_ANY,
    ),
    Planted(
        "data are drawn without a seed",
        OF_SAMPLES,
        [("data.py", NOISE, NOISE.replace("random", "np.random"))],
        words=ONE_AND_TWO,
    ),
    Planted(
        "starting weights are drawn without a seed",
        UNSEEDED,
        [("model.py", "    layers: list", "    torch.seed()\n    layers: list")],
        words=ONE_AND_TWO,
    ),
    Planted(
        "an average in train.py",
        NOT_KEPT,
        [
            ("train.py", BACKWARD, "step.backward(losses(batch).sum() * average)"),
            ("train.py", UPDATE, f"        average = 0.9 * average + 1\n{UPDATE}"),
            ("train.py", "    for step in run", "    average = 1.0\n    for step in run"),
        ],
        words=RESUMED,
    ),
    Planted(
        "a penalty in each micro-batch",
        "a penalty on weights, is added in each micro-batch",
        [("train.py", BACKWARD, BACKWARD.replace("sum()", f"sum() + sum(each.square().sum() for each in {WEIGHTS})"))],
    ),
    Planted(
        "weights clamped after an update",
        "ZeRO overwrites them with copies of its own",
        [("train.py", UPDATE, f"{UPDATE}        [each.data.clamp_(-0.1, 0.1) for each in {WEIGHTS}]\n")],
    ),
    Planted(
        "a hook that clamps gradients of micro-batches",
        "a hook changes that of each micro-batch",
        [
            (
                "train.py",
                "    for step in run",
                f"    [each.register_hook({CLAMP}) for each in {WEIGHTS}]\n    for step in run",
            )
        ],
    ),
    Planted(
        "losses are summed in bf16",
        "in fp32 the first of them agrees",
        [
            ("train.py", ").to(run.dtype)\n        each", ")\n        each"),
            ("train.py", 'batch["weights"].to(run.dtype)', 'batch["weights"].to(logits.dtype)'),
        ],
        words=("--strategies=ddp", "--world-sizes=2", "--no-resume", "--precision=bf16"),
    ),
    Planted(
        "noise drawn in train.py",
        "torch.rand in train.py: draw them in `fetch`, from `derive_seed`",
        [
            IMPORT_TORCH,
            ("train.py", 'model(batch["map"].to(run.dtype))', 'model(batch["map"] + torch.randn_like(batch["map"]))'),
        ],
    ),
    Planted(
        "noise drawn in an evaluation",
        IN_EVALUATION,
        [
            IMPORT_TORCH,
            (
                "train.py",
                "(losses(batch).sum(dim=(1, 2)), batch",
                "(losses(batch).sum(dim=(1, 2)) + torch.rand(1), batch",
            ),
        ],
    ),
    Planted(
        "samples normalized over the micro-batch",
        "samples that share a micro-batch change each other (statistics over it",
        [("train.py", 'model(batch["map"].to(run.dtype))', 'model(batch["map"] - batch["map"].mean())')],
    ),
    Planted(
        "a loss that is summed over processes",
        "gradients and weights agree, only the reported loss does not",
        [
            IMPORT_TORCH,
            (
                "train.py",
                BACKWARD,
                f"loss = losses(batch).sum()\n            {ALL_REDUCE}\n            step.backward(loss)",
            ),
        ],
        words=ONE_AND_TWO,
    ),
    Planted(
        "a curriculum that counts micro-batches",
        "where a process has another number of micro-batches in a step, the first loss differs",
        [
            (
                "train.py",
                BACKWARD,
                f"{BACKWARD.replace('losses(batch)', '(losses(batch) * (1 + seen))')}\n            seen += 1",
            ),
            ("train.py", "    for step in run", "    seen = 0\n    for step in run"),
        ],
        words=ONE_AND_TWO_OF_ANY,
    ),
    Planted(
        "a part of the loss without its gradient",
        "the first loss agrees on several processes, but not its gradient",
        [
            (
                "train.py",
                BACKWARD,
                "loss = losses(batch).sum()\n            "
                f"step.backward(loss - 0.5 * (loss - loss.detach()) * {IS_LATER})",
            )
        ],
        words=ONE_AND_TWO,
    ),
    Planted(
        "clipping in train.py",
        BESIDE_UPDATE,
        [
            IMPORT_TORCH,
            ("train.py", UPDATE, f"        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)\n{UPDATE}"),
        ],
    ),
    Planted(
        "gradients cleared in each micro-batch",
        BESIDE_UPDATE,
        [("train.py", BACKWARD, f"model.zero_grad()\n            {BACKWARD}")],
    ),
    Planted(
        "optimizer.step in train.py",
        BESIDE_UPDATE,
        [("train.py", "model, _ =", "model, own ="), ("train.py", UPDATE, f"        own.step()\n{UPDATE}")],
    ),
    Planted(
        "a scheduler in train.py",
        "remove the scheduler, or whatever sets it, from train.py",
        [
            IMPORT_TORCH,
            (
                "train.py",
                "model, _ = run.prepare(model, build_optimizer(model, run.plan))",
                "own = build_optimizer(model, run.plan)\n    model, _ = run.prepare(model, own)\n"
                "    scheduler = torch.optim.lr_scheduler.ExponentialLR(own, 0.9)",
            ),
            ("train.py", UPDATE, f"{UPDATE}        scheduler.step()\n"),
        ],
    ),
    Planted(
        "an optimizer clamps gradients in place",
        "changes gradients in its step",
        [("softsign.py", STEP, f"parameter.grad.clamp_(-1e-3, 1e-3)\n                {STEP}")],
    ),
    Planted(
        "a layer that one process leaves out",
        "your module has parameters that were not used in producing loss",
        [
            ("model.py", MODEL_END, f"layers[-1] = Sometimes(layers[-1])\n    {MODEL_END}"),
            ("model.py", "def build_model", f"{SOMETIMES}def build_model"),
        ],
        words=ONE_AND_TWO,
    ),
    Planted(
        "a call that one process leaves out",
        "processes must make the same calls",
        [IMPORT_TORCH, ("train.py", BACKWARD, f"{IS_LATER} and torch.distributed.barrier()\n            {BACKWARD}")],
        words=ONE_AND_TWO,
    ),
    Planted(
        "a parameter without a gradient",
        "trainable parameters got no gradient",
        [("model.py", MODEL_END, f"layers[0].unused = nn.Parameter(torch.zeros(3))\n    {MODEL_END}")],
    ),
)
OF_SOUND_TASKS = (
    Planted("nothing", AGREES, words=("--strategies=ddp,fsdp,zero1", "--world-sizes=1,2")),
    Planted("nothing, in bf16", AGREES, words=("--strategies=ddp,zero1", "--world-sizes=2", "--precision=bf16")),
)

BUILT = "optimizer = build_optimizer(model, run.plan)"
TRUST_RATIO = """
    kind = type(optimizer)

    def step(self, closure=None, original=kind.step):
        weights = [weight.detach() for group in self.param_groups for weight in group["params"]]
        shards = [weight.to_local() if hasattr(weight, "to_local") else weight for weight in weights]
        before = [shard.clone() for shard in shards]
        original(self, closure)
        for shard, start in zip(shards, before, strict=True):
            shard.copy_(start + (shard - start) * (0.02 * start.norm()).clamp(1e-3, 1))

    kind.step = step
"""
IN_SHIPPED_RECIPES = tuple(
    Planted(
        f"{about}{recipe.stem}",
        said,
        edits,
        recipe,
        (
            "--tiny-data",
            '--batch={"global_batch_size": 16, "micro_batch_size": 8}',
            "--micro-batch-sizes=8",
            # In bf16, rounding alone changes a few steps of LARS with BatchNorm as much as an error would.
            "--precision=fp32",
            *(["--model.frozen_dtype=fp32"] if '"frozen_dtype": "bf16"' in recipe.read_text() else []),
            "--strategies=ddp,zero1",
            "--world-sizes=2",
            "--no-resume",
        ),
    )
    for recipe in RECIPES
    for about, said, edits in (
        ("a trust ratio with the norm of a shard in ", OF_A_PIECE, [("train.py", BUILT, BUILT + TRUST_RATIO)]),
        ("nothing in ", AGREES, []),
    )
)
ALL = (*OF_OPTIMIZERS, *OF_TASKS, *OF_SOUND_TASKS, *IN_SHIPPED_RECIPES)

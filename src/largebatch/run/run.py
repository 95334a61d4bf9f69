"""The run that a training script drives: it joins the job, resolves the plan, and yields the optimizer steps."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from largebatch.backend.batch_norm import RunningStatistics
from largebatch.backend.check import DTYPES, check_backend, check_before, expect
from largebatch.backend.launch import end_with_the_launcher, notes_on_stopping, read_launch
from largebatch.backend.start import start
from largebatch.backend.state import check_savable
from largebatch.config import RecipeConfig
from largebatch.config.commits import at_commits, find_commits
from largebatch.config.models import LargeModel
from largebatch.data.loading import check_sizes
from largebatch.data.preparation import Preparation
from largebatch.data.source import SampleSource
from largebatch.errors import StorageError, UserError
from largebatch.model.activation_checkpointing import checkpoint_activations
from largebatch.model.attention import autocast_experts, keep_documents_apart, set_attention
from largebatch.model.building import SeededWeights, build_without_weights, perturb_weights
from largebatch.model.channels_last import channels_last_inputs
from largebatch.model.flops import utilization_of
from largebatch.model.parts import is_adapter
from largebatch.optim.groups import decay_summary
from largebatch.optim.trial import try_optimizer
from largebatch.plan import explain, notes_on, resolve
from largebatch.plan.strategies import POLICY_WORDS
from largebatch.run.checkpoint.load import StartingWeights, load, set_weights
from largebatch.run.checkpoint.model_files import end_generation_at, model_files
from largebatch.run.checkpoint.then import check_program
from largebatch.run.command_line import RunOptions
from largebatch.run.evaluate import PerSample, RowsPerSample
from largebatch.run.loop import Loop
from largebatch.run.micro_batch_size import largest_to_try
from largebatch.run.record.folder import OwnFolder
from largebatch.run.record.recorder import Recorder
from largebatch.run.record.task_metrics import Logged
from largebatch.run.record.trackers import check_trackers
from largebatch.run.resume import completed_steps, find_start
from largebatch.run.same_samples import Numbers, check_same_samples
from largebatch.run.step import Step
from largebatch.run.watch.starting import Starting
from largebatch.run.watch.stop import StopRequests
from largebatch.system.failures import building_the_model
from largebatch.words import printable

Config = TypeVar("Config", bound=RecipeConfig)
M = TypeVar("M", bound=nn.Module)


class Run(Generic[Config]):
    """One run of a recipe in one process of the job.

    Args:
        config: The recipe's validated config.
        options: Where the run writes, and what it resumes from.

    Raises:
        UserError: The launch, the batch on this many processes, the folder or the checkpoint cannot be used.
        SystemExit: The run is already finished.
    """

    def __init__(self, config: Config, options: RunOptions):
        self._given = config
        self._options = options
        end_with_the_launcher()
        self.folder = OwnFolder(options.run_dir)
        launch = read_launch(config=config)
        size, notes = largest_to_try(self.folder, config, launch)
        # As far as is known before the processes agree on a checkpoint.
        steps = completed_steps(options.resume, self.folder) if len(config.batch.sizes) > 1 else 0
        self.plan = resolve(config, launch.world_size, size, steps)
        self._given = config.with_micro_batch_size(self.plan.micro_batch_size)
        self.folder.check_usable()
        check_trackers(self.plan.logging.trackers)
        if launch.rank == 0:
            check_program(self.plan.checkpoint)
        try_optimizer(self.plan)

        self.backend = start(launch, self.plan)
        stop_files = self.folder.obeyed_stop_files if self.backend.is_main_process else {}
        self._stop = StopRequests(stop_files, self.backend.all_max, self.plan.faults.time_limit_margin_seconds)
        self._stop.listen()
        self._starting = Starting(self.backend, self._stop, options.ending)
        self._agree_on_the_plan(config)
        notes += [*notes_on(config, self.plan), *notes_on_stopping(self.folder.stop_file)]
        self._print(explain(self.plan, self.folder.path.name, notes))
        groups = f", sharded over groups of {launch.shard_size}" if launch.shard_size else ""
        self._print(f"  {'Strategy':<14}{launch.strategy} on {self.backend.device.type}{groups}")

        self.backend.from_main_process(self.folder.hold)
        self._start = find_start(options.resume, options.allow_change, self.folder, self._given, self.backend)
        if self._start.is_finished:
            step = self._start.step
            total = self.plan.total_steps
            more = "raise train.stop_after_steps to train longer" if step < total else "there is nothing left to do"
            self._print(
                f"the run in {self.folder.path} is finished, after step {step:,} of {total:,}; {more} "
                "(--resume none starts over and moves this one aside)"
            )
            self.backend.end()
            raise SystemExit(0)
        self.plan = resolve(config, launch.world_size, self.plan.micro_batch_size, self._start.step)
        self.plan = replace(self.plan, commits=self._find_commits())
        self.backend.plan = self.plan
        self.config = at_commits(self._given, self.plan.commits)
        self._starting_weights: StartingWeights | None = None
        self._pretrained_folder: Path | None = None
        self._tokenizer_folder: Path | None = None
        self._samples: Numbers = {}
        self._loop: Loop | None = None
        torch.set_default_dtype(self.dtype)
        # The recipe builds its model next, and every process draws the same initial weights.
        torch.manual_seed(self.plan.seed)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights, gradients and losses: float64, or float32 (under bf16 autocast, too)."""
        return DTYPES[self.plan.precision]

    @property
    def is_main_process(self) -> bool:
        """Whether this is the process that prints and writes."""
        return self.backend.is_main_process

    @property
    def completed_steps(self) -> int:
        """Optimizer steps completed, including those of earlier attempts."""
        return self.loop.completed_steps

    @property
    def unwrapped_model(self) -> nn.Module:
        """The model as the recipe built it, from `prepare` on: with its own methods, such as `generate`.

        Its parameters may be sharded. In training, call what `prepare` returned, which reduces the gradients.
        """
        return self.backend.unwrapped_model

    # --- before training ------------------------------------------------------------------------------------------

    def load(self, open_sources: Callable[[Config, Preparation], tuple[SampleSource, ...]]) -> tuple[SampleSource, ...]:
        """Open the training and evaluation sets, first on one process, which prepares what the others read.

        Args:
            open_sources: Opens both sets, and any further ones after them, given the config and how much data a job may
                prepare.

        Raises:
            UserError: They cannot be opened, do not have the plan's sizes, or a process, or the run before it was
                interrupted, has other samples by the same indices; every process raises it.
        """

        preparation = Preparation(f"largebatch prepare {self._options.recipe or 'RECIPE'}")

        def open_checked() -> tuple[SampleSource, ...]:
            opened = open_sources(self.config, preparation)
            check_sizes(opened, self.config.data)
            return opened

        sources = self._starting.once_per_machine_first(open_checked)
        self._samples = check_same_samples(sources, self.config.data.num_workers, self.backend, self._start.samples)
        for name, source in zip(("training", "evaluation"), sources, strict=False):
            available = getattr(source, "num_available", len(source))
            if available > len(source):
                self._print(f"  {'Data':<14}{len(source):,} of {available:,} {name} samples are used")
            if remark := getattr(source, "remark", None):
                self._print(f"  {'Data':<14}{remark}")
        return sources

    def build(self, build_model: Callable[[Config], M]) -> M:
        """Build the model; a `LargeModel`, or one that is `pretrained` and stored as it is, gets its weights in
        `prepare`, which knows the ranges that a process holds.

        Args:
            build_model: Builds the model with its initial weights, given the config.

        Raises:
            UserError: The files with its initial weights cannot be used; every process raises it.
        """
        section = self.config.model
        build = partial(build_model, self.config)
        if section.read_in_parts_from is not None:
            in_parts = self._build_in_parts(build, section.read_in_parts_from)
            if in_parts is not None:
                return in_parts
        with self.backend.raise_on_all_ranks(), building_the_model():
            if not isinstance(section, LargeModel):
                return build()
            is_drawn = section.initial_weights is None
            model, draws = build_without_weights(build, lambda _: is_drawn)
        if section.initial_weights is None:
            self._starting_weights = SeededWeights(model, draws, self.plan.seed)
        elif self._start.manifest is None:
            # Imported only here, because `transformers` and `datasets`, which it imports, take seconds.
            from largebatch.model.pretrained import PretrainedWeights, find_folder

            folder = self._starting.once_per_machine_first(partial(find_folder, section.initial_weights))
            with self.backend.raise_on_all_ranks():
                self._starting_weights = PretrainedWeights(folder, model)
        return model

    def _build_in_parts(self, build: Callable[[], M], where: str) -> M | None:
        """Build a pretrained model without weights; None, after saying why, if it must be loaded whole."""
        from largebatch.model.pretrained import PretrainedWeights, find_folder

        folder = self._starting.once_per_machine_first(partial(find_folder, where, "model.path"))
        self._pretrained_folder = folder
        tokenizer = getattr(self.config.data, "tokenizer", where)
        if tokenizer != "bytes":
            self._tokenizer_folder = self._starting.once_per_machine_first(
                partial(find_folder, tokenizer, "data.tokenizer")
            )
        reason = None
        try:
            model, draws = build_without_weights(build, is_adapter)
            weights = PretrainedWeights(folder, model, SeededWeights(model, draws, self.plan.seed))
        # Of any kind: if building it whole does not work either, that raises the error.
        except Exception as error:
            reason = " ".join(str(error).split())
        reasons = [each for each in self.backend.gather_objects(reason) if each is not None]
        if reasons:
            self._print(f"  {'Model':<14}loaded whole on every process: {reasons[0]}")
            return None
        self._starting_weights = weights
        return model

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, stop_tokens: Sequence[int] = ()
    ) -> tuple[nn.Module, Optimizer]:
        """Wrap model and optimizer for the strategy, and begin an attempt.

        Args:
            model: The model, as `build` returned it.
            optimizer: The optimizer of its parameters.
            stop_tokens: Tokens at which the saved model's generation ends, besides those of its generation config.

        Raises:
            BackendMismatch: The strategy would not do what the plan says.
        """
        backend = self.backend
        compute = self.plan.compute
        manifest = self._start.manifest
        self._starting.check()
        with backend.raise_on_all_ranks():
            check_before(model, optimizer, backend)
            check_savable(model)
            # Refuses BatchNorm layers whose statistics it cannot keep.
            RunningStatistics(model)
            if compute.activation_checkpointing != "none":
                checkpoint_activations(model, compute.activation_checkpointing)
            if compute.channels_last:
                channels_last_inputs(model)
            if compute.attention is not None:
                set_attention(model, compute.attention)
            keep_documents_apart(model)
            autocast_experts()
            # Before the strategy changes the model's class.
            files = model_files(model, self._pretrained_folder, self._tokenizer_folder)
            added = end_generation_at(stop_tokens, files)
        if added:
            self._print(
                f"  {'Generation':<14}of the saved model also ends at token {', '.join(map(str, added))}, as answers do"
            )
        utilization = utilization_of(self.config, model, backend.device, self.plan.world_size)
        if self.plan.optimizer.weight_decay:
            self._print(f"  {'Weight decay':<14}{decay_summary(optimizer.param_groups)}")
        expected = expect(self.plan, backend.launch, optimizer)
        prepared = backend.prepare(model, optimizer)
        if backend.compiled:
            self._print(f"  {'Compiled':<14}{backend.compiled}")
        if len(backend.launch.entry.reduction_policies) > 1 and self.plan.max_gradient_accumulation_steps > 1:
            self._print(f"  {'Gradients':<14}reduced with {POLICY_WORDS[backend.reduces]}")
        with backend.raise_on_all_ranks():
            check_backend(backend, expected)
        # Models come from `from_pretrained` in evaluation mode, without dropout.
        backend.model.train()
        with backend.raise_on_all_ranks():
            if manifest is not None:
                assert self._start.checkpoint is not None
                load(backend, self._start.checkpoint, manifest)
            elif self._starting_weights is not None:
                set_weights(backend, self._starting_weights)
        seed = self._options.perturb_weights
        if manifest is None and seed is not None:
            if self.plan.world_size > 1:
                raise UserError("--perturb-weights changes the weights of a single process; launch one")
            perturb_weights(backend.model, seed)
        recorder = Recorder(self._given, backend, self.folder, self._start, self._options, utilization)
        self._loop = Loop(self._given, backend, self._start, recorder, self._stop, files, self._samples)
        self._loop.agree_on_compiling()
        self._starting.check()
        # Garbage collection during training need not go through everything that exists by now.
        gc.collect()
        gc.freeze()
        return prepared

    # --- training -------------------------------------------------------------------------------------------------

    @property
    def loop(self) -> Loop:
        """The steps that are left, from `prepare` on."""
        if self._loop is None:
            raise RuntimeError("the model is not prepared yet; call run.prepare(model, optimizer) first")
        return self._loop

    def steps(self, train_set: SampleSource) -> Iterator[Step]:
        """The optimizer steps that are left; the recipe's loop must pass each to `update`.

        A checkpoint is written when the loop asks for the next step, after a step's evaluation.

        Raises:
            RunStopped: The run was asked to stop, and its checkpoint is written.
        """
        self._starting.end()
        return self.loop.steps(train_set)

    def update(self, step: Step) -> None:
        """Set the learning rate, clip, take the optimizer step, and log if due."""
        self.loop.update(step)

    def log(self, values: Mapping[str, Logged]) -> None:
        """Add training metrics of the task's own to the step's line in metrics.jsonl, trackers and report.

        To be called before the step's `update`, for each micro-batch or once. Only what is logged in a step that gets
        a line is kept, and only then does the host wait for the device.

        Args:
            values: By name: a pair of sum and weight, such as (number of correct samples, number of samples), whose
                sums over all micro-batches and processes are divided once; or a number, of which the main process's
                last one is kept. Each is a number or a tensor without dimensions, of which a copy is kept.
        """
        if self.loop.step is None:
            raise RuntimeError("run.log was called before the first step; call it between steps(…) and update")
        self.loop.step.log(values)

    @property
    def should_evaluate(self) -> bool:
        """Whether an evaluation is due after the step just completed."""
        return self.plan.evaluates_after(self.completed_steps)

    def should_evaluate_on(self, name: str) -> bool:
        """Whether one is due of a further set, which has its own interval in the recipe's `evaluation.sets`."""
        return self.plan.evaluates_after(self.completed_steps, name)

    def evaluate(
        self,
        eval_set: SampleSource,
        per_sample: PerSample,
        name: str | None = None,
        before: Callable[[], object] = lambda: None,
    ) -> dict[str, float]:
        """Means over a set of samples, each counted once, with the model in evaluation mode.

        Args:
            eval_set: The evaluation set, or another source with any number of samples, the same on all processes.
            per_sample: Maps a batch to values by name, as for `mean_over_samples`: {"loss": (batch,), …}.
            name: The name of a further set in the recipe's `evaluation.sets`; None for the evaluation set.
            before: Computes with the model what `per_sample` compares with. It is called with the weights of training,
                and again with their averages if the recipe has them.

        Returns:
            The means by name; those of a further set as "name/loss".

        Raises:
            UserError: The recipe has no set of this name.
            TrainingFailed: A mean is not finite.
        """
        return self.loop.evaluate(eval_set, per_sample, name, before)

    def rows(self, source: SampleSource, num_samples: int, per_sample: RowsPerSample) -> dict[str, torch.Tensor]:
        """Values of individual samples, without augmentation and with the model in evaluation mode.

        Args:
            source: Either set.
            num_samples: How many of its samples, from the first on.
            per_sample: Maps a batch to tensors by name, with one row per sample. Names, dtypes and the shapes of rows
                must be the same in every batch.

        Returns:
            The tensors by name, with one row per sample, in order, the same on every process.

        Raises:
            UserError: Names, dtypes or shapes differ; every process raises it.
        """
        return self.loop.evaluator.rows(source, num_samples, per_sample)

    def evaluating(self) -> AbstractContextManager[None]:
        """Run forward passes as `evaluate` does: in evaluation mode, without gradients, and not counted as training."""
        return self.loop.evaluator.evaluating()

    def any_process(self, is_true: bool) -> bool:
        """Whether something is true on any process, such as that its text goes on; all of them must call this."""
        self.loop.watchdog.heartbeat()
        return bool(self.backend.all_max(int(is_true))())

    def finish(self) -> None:
        """Write the last checkpoint if there is none yet, the final weights and the summary, and leave the job."""
        self.loop.finish()
        self._stop.close()

    # --- all processes together -----------------------------------------------------------------------------------

    def _print(self, text: str) -> None:
        if self.backend.is_main_process:
            print(printable(text), flush=True)

    def _agree_on_the_plan(self, config: RecipeConfig) -> None:
        """Refuse machines with a different copy of the recipe, which would silently train something else."""
        launch = self.backend.launch
        launched = (launch.strategy, launch.deepspeed_config, launch.reshards)
        if ranks := self.backend.differing_ranks((config.model_dump_json(), launched)):
            raise UserError(
                f"the config differs from rank 0's on rank {ranks}; launch all ranks with the same recipe, overrides, "
                "Accelerate config and DeepSpeed config",
                everywhere=True,
            )
        # It also follows from the run folder: how earlier starts ended, for "auto", and the step of a changing batch.
        if ranks := self.backend.differing_ranks(self.plan.to_json()):
            raise StorageError(
                f"the plan differs from rank 0's on rank {ranks}, which may see late what an earlier start has left; "
                "the same command tries again",
                everywhere=True,
            )

    def _find_commits(self) -> dict[str, str]:
        """The commits of the repositories that the config names: those of the checkpoint, or as they are now."""
        known = self._start.manifest.plan.get("commits", {}) if self._start.manifest else {}
        commits = self.backend.from_main_process(partial(find_commits, self._given, known))
        for name, commit in commits.items():
            self._print(f"  {'Hub':<14}{name} is read at commit {commit}")
        return commits

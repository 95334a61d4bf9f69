"""Strategies whose parameters and optimizer are torch's own: one process, DDP and FSDP2."""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import DistributedType, PartialState
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from largebatch.backend.base import Backend, Observed, Request, Update, group_options, trainable_parameters
from largebatch.backend.compilation import refuse_to_compile
from largebatch.backend.state import (
    EngineState,
    OptimizerSlot,
    parameters_without_memory,
    persistent_buffers,
    pieces_of,
    split_state,
    weight_vectors,
)
from largebatch.errors import BackendMismatch
from largebatch.model.embedding_layers import EmbeddingGetter, embedding_layer
from largebatch.optim.layerwise import LayerPart, local_part
from largebatch.storage.layout import ParameterInfo


class NativeBackend(Backend):
    """Gradients are in `parameter.grad` and the optimizer is torch's, so clipping and stepping are done here."""

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        if self.plan.precision == "bf16":
            # Not by Accelerate, which for FSDP2 would cast weights and their gradients instead, and so reduce in bf16.
            model.forward = torch.autocast(self.device.type, torch.bfloat16)(model.forward)
        return super()._wrap(model, optimizer)

    def backward(self, loss: torch.Tensor, factor: float | torch.Tensor) -> None:
        # As Accelerate's would, which looks for a package on the disk at each call; so does its optimizer's step.
        loss.backward(gradient=self._gradient_of(loss, factor))  # type: ignore[no-untyped-call]

    _constant = (math.nan, torch.empty(0))
    """The last factor that was a number, and its tensor: most often all steps have the same."""

    def _gradient_of(self, loss: torch.Tensor, factor: float | torch.Tensor) -> torch.Tensor:
        """The gradient that a backward pass begins with; a product would be one more operation, with one of its own."""
        if isinstance(factor, torch.Tensor):
            return factor.to(loss.dtype)
        number, gradient = self._constant
        if factor != number or gradient.dtype != loss.dtype:
            gradient = torch.full_like(loss, factor)
            self._constant = (factor, gradient)
        return gradient

    def parameters_without_gradient(self) -> list[str]:
        parameters = self.unwrapped_model.named_parameters()
        return [name for name, parameter in parameters if parameter.requires_grad and parameter.grad is None]

    def update(self, learning_rate: float, measure_norm: bool) -> Update:
        norm = None
        leaves_out = self.plan.on_non_finite != "stop"
        if measure_norm or leaves_out or self.plan.clip_norm is not None:
            parameters = [parameter for parameter in trainable_parameters(self.model) if parameter.grad is not None]
            norm = get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
            if isinstance(norm, DTensor):
                norm = norm.full_tensor()
            if leaves_out and not torch.isfinite(norm):
                self._clear_gradients()
                return Update(norm, applied=False)
            if self.plan.clip_norm is not None:
                clip_grads_with_norm_(parameters, self.plan.clip_norm, norm)
        self.set_learning_rate(learning_rate)
        self._torch_optimizer.step()
        self._clear_gradients()
        return Update(norm, applied=True)

    def _clear_gradients(self) -> None:
        # What `zero_grad` does, without its record for the profiler.
        for group in self._torch_optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @property
    def _torch_optimizer(self) -> Optimizer:
        optimizer: Optimizer = self.optimizer.optimizer  # type: ignore[attr-defined]  # Accelerate's wrapper
        return optimizer

    def _optimizer_slots(self) -> list[OptimizerSlot]:
        parameters = self.unwrapped_model.named_parameters()
        return [
            OptimizerSlot(parameter, [LayerPart(name, 0, local_part(parameter).numel())])
            for name, parameter in parameters
            if parameter.requires_grad
        ]

    def engine_state(self) -> EngineState:
        vectors, parameters = weight_vectors(self.unwrapped_model), {}
        for name, parameter in self.unwrapped_model.named_parameters():
            state = self._torch_optimizer.state.get(parameter, {})
            states, scalars = split_state(state, parameter, name, self.plan)
            vectors |= {f"{kind}/{name}": tensor for kind, tensor in states.items()}
            shape = tuple(parameter.shape)
            others = {kind: tuple(tensor.shape) for kind, tensor in states.items() if tensor.shape != parameter.shape}
            parameters[name] = ParameterInfo(shape, scalars, others)
        return EngineState(
            parameters=parameters,
            pieces=pieces_of(vectors, self.rank, self.world_size),
            buffers=persistent_buffers(self.unwrapped_model),
        )

    def observe(self) -> Observed:
        return self.observe_launch() | {
            "parameters per group": [
                sum(parameter.numel() for parameter in group["params"]) for group in self.optimizer.param_groups
            ],
            "hyperparameters per group": group_options(self.optimizer),
            "master weights": {str(parameter.dtype) for parameter in trainable_parameters(self.model)},
        }


class ReplicatedBackend(NativeBackend):
    """Every process holds the whole model."""

    _cuts_layers = False

    @staticmethod
    def accelerate_arguments(request: Request) -> dict[str, Any]:
        # Buffers are averaged before they are used; broadcasting rank 0's would lose the other processes' statistics.
        ddp = DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
        return {"cpu": not request.on_gpu, "kwargs_handlers": [request.group, ddp]}

    def _gather_state(self) -> dict[str, torch.Tensor]:
        return self.unwrapped_model.state_dict()


class SingleBackend(ReplicatedBackend):
    """One process, launched alone."""

    def mark_micro_step(self, is_last: bool) -> None:
        pass

    def observe(self) -> Observed:
        return super().observe() | {"strategy": self.launch.strategy}


class DdpBackend(ReplicatedBackend):
    """DistributedDataParallel: gradients are all-reduced once per optimizer step, with its last micro-batch."""

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        prepared = super()._wrap(model, optimizer)
        self._settle_buckets()
        return prepared

    def _settle_buckets(self) -> None:
        """Let DDP put its gradients into the buckets that it keeps.

        It makes them anew after the first backward pass, in the order in which gradients came. How a sum over three or
        more processes is rounded depends on its place in a bucket, so the first step after a resume would differ from
        the same step of a run that was not interrupted. A backward pass of zeros beforehand gives the parameters'
        reverse order, once and for all.
        """
        if not isinstance(self.model, DistributedDataParallel):
            return
        reducer = self.model.reducer
        reducer.prepare_for_forward()
        reducer.prepare_for_backward([])
        # Backward passes go through the sums from the last to the first.
        total = torch.zeros((), device=self.device, dtype=next(trainable_parameters(self.model)).dtype)
        for parameter in trainable_parameters(self.model):
            total = total + parameter.flatten()[:1].sum() * 0.0
        total.backward()  # type: ignore[no-untyped-call]
        reducer._rebuild_buckets()
        self.optimizer.zero_grad(set_to_none=True)

    def mark_micro_step(self, is_last: bool) -> None:
        # What `DistributedDataParallel.no_sync` sets, for the forward pass too. One process has no wrapper.
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = is_last

    def observe(self) -> Observed:
        wrapped = isinstance(self.model, DistributedDataParallel) or self.world_size == 1
        return super().observe() | {"strategy": self.launch.strategy if wrapped else "no gradient reduction"}


class FsdpBackend(NativeBackend):
    """FSDP2: gradients are reduce-scattered once per optimizer step, with its last micro-batch.

    Meanwhile each process keeps its whole gradients: what FSDP2 documents for accumulation without communication.
    """

    @staticmethod
    def accelerate_arguments(request: Request) -> dict[str, Any]:
        if not request.on_gpu:
            _rehearse_fsdp_on_cpu()
        return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2), "kwargs_handlers": [request.group]}

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        names = {parameter: name for name, parameter in model.named_parameters()}
        groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
        with sharded_apart(model):
            prepared = super()._wrap(model, optimizer)
        if len(list(model.named_parameters())) != len(names):
            raise BackendMismatch(
                "FSDP has made several parameters of one that modules share, which would be trained apart; leave "
                "fsdp_transformer_layer_cls_to_wrap out of the Accelerate config, or name modules that share none"
            )
        if parameters_without_memory(model):
            self._materialize_shards(groups)
        for region in self._compiled:
            if any(isinstance(part, FSDPModule) for part in region.modules() if part is not region):
                raise refuse_to_compile(region, self.launch.strategy)
        return prepared

    def _materialize(self, model: nn.Module) -> None:
        """Not before the engine has cut them up."""

    def _materialize_shards(self, groups: list[list[str]]) -> None:
        """Make memory for this process's rows of parameters that were built without.

        Accelerate tells an optimizer's parameters apart by the address of their memory, so it has mistaken them.

        Args:
            groups: Names of the parameters in each of the optimizer's groups.
        """
        # By way of the modules, so that FSDP takes notice.
        self.unwrapped_model._apply(  # type: ignore[no-untyped-call]
            lambda tensor: torch.empty_like(tensor, device=self.device) if tensor.is_meta else tensor
        )
        parameters = dict(self.unwrapped_model.named_parameters())
        for group, names in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = [parameters[name] for name in names]

    def mark_micro_step(self, is_last: bool) -> None:
        assert isinstance(self.model, FSDPModule)
        self.model.set_is_last_backward(is_last)
        self.model.set_requires_gradient_sync(is_last)

    def engine_state(self) -> EngineState:
        # An evaluation leaves the root module's parameters gathered, which are other objects than the sharded ones.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return super().engine_state()

    def observe(self) -> Observed:
        is_sharded = isinstance(self.model, FSDPModule)
        return super().observe() | {"strategy": self.launch.strategy if is_sharded else "no sharding"}


def _rehearse_fsdp_on_cpu() -> None:
    """Accelerate turns FSDP on for accelerator devices only: tell it that the CPU is one, over gloo."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"

    def prepare_backend(*_: object, **__: object) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    PartialState._prepare_backend = prepare_backend


@contextmanager
def sharded_apart(model: nn.Module) -> Iterator[None]:
    """Have Accelerate shard such parts of a model on their own as share no parameter with the rest of it.

    It takes the blocks that the model names, and asks it for its embeddings. Some models of `transformers` name an
    embedding among the blocks that the output layer shares, which FSDP would quietly make two; some answer with an
    exception instead of none, or with a part of a block that is sharded as a whole.
    """
    names = getattr(model, "_no_split_modules", None) or ()
    blocks = {name: [module for module in model.modules() if type(module).__name__ == name] for name in names}
    blocks = {name: found for name, found in blocks.items() if all(_shares_nothing(model, [each]) for each in found)}
    parts = [part for found in blocks.values() for block in found for part in block.modules() if part is not block]
    embeddings = {getter: embedding_layer(model, getter) for getter in get_args(EmbeddingGetter)}
    unusable = [name for name, found in embeddings.items() if found is None or any(found is part for part in parts)]
    # Where they share their weights, they become one unit.
    if not _shares_nothing(model, [found for found in embeddings.values() if found is not None]):
        unusable = [*embeddings]
    replaced = {"_no_split_modules": list(blocks)} | {name: lambda: None for name in unusable}
    before = {name: value for name, value in vars(model).items() if name in replaced}
    vars(model).update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del vars(model)[name]
        vars(model).update(before)


def _shares_nothing(model: nn.Module, modules: Sequence[nn.Module]) -> bool:
    """Whether no parameter of these modules is one of the model's other modules, too."""
    inside = {part for module in modules for part in module.modules()}
    theirs = {parameter for module in modules for parameter in module.parameters()}
    others = (module for module in model.modules() if module not in inside)
    return not any(parameter in theirs for other in others for parameter in other.parameters(recurse=False))

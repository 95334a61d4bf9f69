"""FSDP2, and the units into which Accelerate divides a model for it."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.state import DistributedType, PartialState
from accelerate.utils.fsdp_utils import _find_final_norm, get_module_class_from_name
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from largebatch.backend.base import Observed, Request
from largebatch.backend.compilation import refuse_to_compile
from largebatch.backend.native import NativeBackend
from largebatch.backend.state import EngineState, parameters_without_memory
from largebatch.errors import BackendMismatch
from largebatch.model.parts import EMBEDDING_GETTERS, embedding_layer


class FsdpBackend(NativeBackend):
    """FSDP2: gradients are reduce-scattered once per optimizer step, with its last micro-batch.

    Until then each process keeps whole gradients, as FSDP2 documents for accumulation without communication.
    """

    @staticmethod
    def accelerate_arguments(request: Request) -> dict[str, Any]:
        if not request.on_gpu:
            _rehearse_fsdp_on_cpu()
        return {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2), "kwargs_handlers": [request.group]}

    def _wrap(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        names = {parameter: name for name, parameter in model.named_parameters()}
        groups = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
        with shardable_parts(model):
            prepared = super()._wrap(model, optimizer)
        if len(list(model.named_parameters())) != len(names):
            raise BackendMismatch(
                "FSDP has split a parameter that modules share into several, which would be trained separately; remove "
                "fsdp_transformer_layer_cls_to_wrap from the Accelerate config, or name modules that share no parameter"
            )
        if parameters_without_memory(model):
            self._materialize_shards(groups)
        for region in self._compiled:
            if any(isinstance(part, FSDPModule) for part in region.modules() if part is not region):
                raise refuse_to_compile(region, self.launch.strategy)
        return prepared

    def _materialize(self, model: nn.Module) -> None:
        """Allocate nothing before the engine has sharded the parameters."""

    def _materialize_shards(self, groups: list[list[str]]) -> None:
        """Allocate this process's rows of parameters that were built without memory.

        Accelerate tells an optimizer's parameters apart by their memory addresses, so it has confused them; `groups`
        has the names of the parameters in each of the optimizer's groups.
        """
        # Through the modules, so that FSDP registers the change.
        self.unwrapped_model._apply(  # type: ignore[no-untyped-call]
            lambda tensor: torch.empty_like(tensor, device=self.device) if tensor.is_meta else tensor
        )
        parameters = dict(self.unwrapped_model.named_parameters())
        for group, names in zip(self.optimizer.param_groups, groups, strict=True):
            group["params"] = [parameters[name] for name in names]

    def mark_micro_step(self, is_last: bool) -> None:
        # Each backward pass stays the "last": otherwise FSDP2 would keep the order of its units from one micro-batch to
        # the next, and gather the tail once more than it is used.
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(is_last)

    def engine_state(self) -> EngineState:
        # An evaluation leaves the root's parameters gathered, which are different objects from the sharded ones.
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return super().engine_state()

    def observe(self) -> Observed:
        is_sharded = isinstance(self.model, FSDPModule)
        return super().observe() | {"strategy": self.launch.strategy if is_sharded else "no sharding"}


def _rehearse_fsdp_on_cpu() -> None:
    """Make Accelerate treat the CPU as an accelerator, over gloo, because it uses FSDP only on accelerators."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"

    def prepare_backend(*_: object, **__: object) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    PartialState._prepare_backend = prepare_backend


@contextmanager
def shardable_parts(model: nn.Module) -> Iterator[None]:
    """In the block, let Accelerate shard as units only parts of a model that share no parameter with the rest.

    It takes the blocks that the model names, and the embeddings that the model returns. Some models of `transformers`
    name as a block an embedding that the output layer shares, which FSDP would silently make two parameters; some
    raise instead of returning no embedding, or return a part of a block, which is sharded as a whole.
    """
    names = getattr(model, "_no_split_modules", None) or ()
    blocks = {name: [module for module in model.modules() if type(module).__name__ == name] for name in names}
    blocks = {name: found for name, found in blocks.items() if all(_shares_nothing(model, [each]) for each in found)}
    parts = [part for found in blocks.values() for block in found for part in block.modules() if part is not block]
    embeddings = {getter: embedding_layer(model, getter) for getter in EMBEDDING_GETTERS}
    unusable = [name for name, found in embeddings.items() if found is None or any(found is part for part in parts)]
    # Embeddings that share their weights with each other become one unit.
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
    """Whether no parameter of these modules also belongs to another module of the model."""
    inside = {part for module in modules for part in module.modules()}
    theirs = {parameter for module in modules for parameter in module.parameters()}
    others = (module for module in model.modules() if module not in inside)
    return not any(parameter in theirs for other in others for parameter in other.parameters(recurse=False))


def fsdp_units(model: nn.Module) -> tuple[dict[nn.Parameter, int], frozenset[int]]:
    """The number of each parameter's unit, as Accelerate forms them, and the units that are gathered only once.

    Each block and each embedding is a unit. The final norm with the output layer (the tail), and everything else (the
    root), stay gathered from the forward to the backward pass.
    """
    with shardable_parts(model):
        names = getattr(model, "_no_split_modules", None) or ()
        kinds = tuple(kind for kind in (get_module_class_from_name(model, name) for name in names) if kind)
        apart = [[module] for module in reversed([*model.modules()][1:]) if isinstance(module, kinds)]
        given, output = (embedding_layer(model, getter) for getter in EMBEDDING_GETTERS)
        tied = given is not None and getattr(given, "weight", None) is getattr(output, "weight", model)
        if given is not None and not tied:
            apart.append([given])
        tail = [_find_final_norm(model), output]
    units: dict[nn.Parameter, int] = {}
    for number, modules in enumerate([*apart, [module for module in tail if module is not None], [model]]):
        for module in modules:
            for parameter in module.parameters():
                units.setdefault(parameter, number)
    return units, frozenset({len(apart), len(apart) + 1})

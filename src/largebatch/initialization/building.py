"""Building a model without its weights, and taking down which weights it would have begun with.

Parameters are put on the meta device as modules register them, so that there is never more than one that has memory.
Buffers are computed as ever: no file has those that are not persistent, such as rotary frequencies. What the model's
own initialisation does to its parameters is noted as it goes through torch; the last operation on each decides.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from largebatch.errors import BackendMismatch
from largebatch.initialization.drawn import Constant, Distribution, Normal, Uniform

M = TypeVar("M", bound=nn.Module)

# Operations in place, and what a parameter is afterwards.
NOTED: dict[str, Callable[..., Distribution]] = {
    "normal_": lambda mean=0.0, std=1.0: Normal(float(mean), float(std)),
    "uniform_": lambda low=0.0, high=1.0: Uniform(float(low), float(high)),
    "fill_": lambda value: Constant(float(value)),
    "zero_": lambda: Constant(0.0),
}

NOTHING = (None, "nothing")


def build_without_weights(build: Callable[[], M]) -> tuple[M, dict[str, Distribution]]:
    """The model that `build` makes, with parameters on the meta device, and what each of them is to begin with.

    Raises:
        BackendMismatch: A parameter is not initialised, or in a way that cannot be repeated from its name.
    """
    notes = _Notes()
    with _parameters_without_memory(), notes:
        model = build()
    return model, {name: notes.distribution(name, parameter) for name, parameter in model.named_parameters()}


def build_shapes(build: Callable[[], M]) -> M:
    """The model that `build` makes, with parameters on the meta device, and no weights read from files.

    Whatever it makes is there, unless it looks at numbers meanwhile, as some models do to draw paths at random; then
    parameters alone are.
    """
    try:
        with torch.device("meta"):
            return build()
    except RuntimeError:
        with _parameters_without_memory():
            return build()


class _Notes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What operations in place have made of tensors on the meta device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes: dict[int, tuple[Distribution | None, str]] = {}
        # Another tensor must not get the address of one that is gone, and with it its note.
        self._kept: list[torch.UntypedStorage] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        arguments = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)}
        for argument in func._schema.arguments:
            tensor = (arguments | kwargs).get(argument.name)
            if argument.is_write and isinstance(tensor, torch.Tensor) and tensor.is_meta:
                options = {name: value for name, value in kwargs.items() if name != "generator"}
                self._note(func._schema.name.removeprefix("aten::"), tensor, args[1:], options)
        if func._schema.name == "aten::constant_pad_nd" and args[0].is_meta and not any(args[1]):
            # `transformers` puts an output layer's bias, padded by nothing, in its own place.
            self._keep(result)
            self._notes[_storage(result)] = self._notes.get(_storage(args[0]), NOTHING)
        return result

    def _note(self, operation: str, tensor: torch.Tensor, values: Sequence[Any], options: Mapping[str, Any]) -> None:
        is_whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        self._keep(tensor)
        distribution = NOTED[operation](*values, **options) if is_whole and operation in NOTED else None
        self._notes[_storage(tensor)] = (distribution, operation if is_whole else f"{operation} of a part")

    def _keep(self, tensor: torch.Tensor) -> None:
        if _storage(tensor) not in self._notes:
            self._kept.append(tensor.untyped_storage())

    def distribution(self, name: str, parameter: torch.Tensor) -> Distribution:
        """What a parameter of the model that was built is to begin with."""
        distribution, operation = self._notes.get(_storage(parameter), NOTHING)
        if distribution is None:
            raise BackendMismatch(
                f"the model's parameter {name} would begin with values that do not follow from its name: the last "
                f"thing done to it in place, once its module has it, is {operation}; initialise it with one of "
                f"{', '.join(NOTED)}, as torch.nn.init does"
            )
        return distribution


def _storage(tensor: torch.Tensor) -> int:
    """The same for a tensor and its views."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Have modules register parameters on the meta device; one that several share stays one."""
    register = nn.Module.register_parameter
    twins = WeakTensorKeyDictionary()

    def register_without_memory(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            if param not in twins:
                twins[param] = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
            param = twins[param]
        register(self, name, param)

    nn.Module.register_parameter = register_without_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]

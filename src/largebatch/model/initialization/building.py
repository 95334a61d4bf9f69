"""Building a model without its weights, and recording which weights it would have begun with.

Parameters are put on the meta device as modules register them, so that never more than one of them has memory. Buffers
are computed as usual: no file has those that are not persistent, such as rotary frequencies. What the model's own
initialization does to its parameters is recorded as it goes through torch; the last operation on each decides.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from largebatch.errors import BackendMismatch
from largebatch.model.initialization.seeded import Constant, Distribution, Normal, Uniform

M = TypeVar("M", bound=nn.Module)

# Operations in place, and what a parameter is afterwards.
NOTED: dict[str, type[Distribution]] = {
    "normal_": Normal,
    "uniform_": Uniform,
    "fill_": Constant,
    "zero_": Constant,
}

NOTHING = (None, "nothing")


def build_without_weights(build: Callable[[], M]) -> tuple[M, dict[str, Distribution]]:
    """The model that `build` makes, with parameters on the meta device, and what each of them is drawn from.

    Raises:
        BackendMismatch: A parameter is not initialized, or in a way that cannot be repeated from its name.
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
            self._notes[storage_of(result)] = self._notes.get(storage_of(args[0]), NOTHING)
        return result

    def _note(self, operation: str, tensor: torch.Tensor, values: Sequence[Any], options: Mapping[str, Any]) -> None:
        is_whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        self._keep(tensor)
        distribution = None
        if is_whole and operation in NOTED:
            numbers = {name: float(value) for name, value in options.items()}
            distribution = NOTED[operation](*map(float, values), **numbers)
        self._notes[storage_of(tensor)] = (distribution, operation if is_whole else f"{operation} of a part")

    def _keep(self, tensor: torch.Tensor) -> None:
        if storage_of(tensor) not in self._notes:
            self._kept.append(tensor.untyped_storage())

    def distribution(self, name: str, parameter: torch.Tensor) -> Distribution:
        """What a parameter of the model that was built is to begin with."""
        distribution, operation = self._notes.get(storage_of(parameter), NOTHING)
        if distribution is None:
            raise BackendMismatch(
                f"the model's parameter {name} would begin with values that do not follow from its name: the last "
                f"thing done to it in place, once its module has it, is {operation}; initialize it with one of "
                f"{', '.join(NOTED)}, as torch.nn.init does"
            )
        return distribution


def storage_of(tensor: torch.Tensor) -> int:
    """An identity that a tensor shares with its views."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Have modules register parameters on the meta device; one that several share stays one."""
    register = nn.Module.register_parameter
    replaced = WeakTensorKeyDictionary()

    def register_without_memory(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            if param not in replaced:
                replaced[param] = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
            param = replaced[param]
        register(self, name, param)

    nn.Module.register_parameter = register_without_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]

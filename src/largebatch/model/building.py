"""Building a model without its weights, and drawing each weight from the run's seed and its name alone.

Modules register their parameters on the meta device, so that at most one parameter at a time has memory. Buffers are
computed as usual, because some, such as rotary frequencies, are in no file. The model's own initialization of each
parameter is recorded as it passes through torch; the last operation wins.
"""

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from largebatch.data.order import derive_seed
from largebatch.errors import BackendMismatch
from largebatch.storage.tensors import fingerprint

M = TypeVar("M", bound=nn.Module)

# Operations that can be repeated for a parameter of any name: functions of `torch.nn.init`, and methods of tensors.
RANDOM = ("normal_", "uniform_", "trunc_normal_")
FILLS = ("fill_", "zero_")
REPEATABLE = (*RANDOM, *FILLS)
ASKS_FOR_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]

# Elements that are drawn together. No parameter of the small recipes has more, so that each has one generator.
BLOCK = 2**16
# The words of the Mersenne Twister, 32 bits each, and where torch keeps them, as 64 bits each, in the state of a
# generator on the CPU (`CPUGeneratorImplStateLegacy` in aten/src/ATen/CPUGeneratorImpl.cpp, read in torch 2.13).
TWISTER_WORDS = 624
TWISTER_OFFSET = 24


class Draw(NamedTuple):
    """An operation of `REPEATABLE` on a whole parameter, with its numbers, such as "normal_" and (0.0, 0.02)."""

    operation: str
    numbers: tuple[float, ...] = ()
    # Ranges of elements that were filled with a number afterward, such as the row of `padding_idx` in an embedding.
    fills: tuple[tuple[int, int, float], ...] = ()


def build_without_weights(
    build: Callable[[], M], is_drawn: Callable[[str], bool] = lambda _: True
) -> tuple[M, dict[str, Draw]]:
    """Return the model that `build` makes, with parameters on the meta device, and the operations that initialize the
    parameters for which `is_drawn(name)` is true.

    Raises:
        BackendMismatch: A parameter is not initialized, or in a way that cannot be repeated from its name.
    """
    recorder = _InitRecorder()
    with _parameters_without_memory(), recorder, _initializers_on_meta(recorder):
        model = build()
    return model, {name: recorder.draw_of(name, each) for name, each in model.named_parameters() if is_drawn(name)}


def build_shapes(build: Callable[[], M]) -> M:
    """The model that `build` makes, all of it on the meta device, with no weights read from files.

    If a model reads numbers while it is built, as some do for stochastic depth, only its parameters are on it.
    """
    try:
        with torch.device("meta"):
            return build()
    except RuntimeError:
        with _parameters_without_memory():
            return build()


class SeededWeights:
    """The initial weights of a model with parameters on the meta device, each a function of the seed and its name.

    A parameter, flattened, is drawn in blocks of `BLOCK` elements, each by a generator of its own. So a process draws
    only the blocks of which it holds a part, and the weights are the same on every strategy and number of processes.
    (If different machines round a normal distribution differently, the run does not start.)
    """

    def __init__(self, model: nn.Module, draws: Mapping[str, Draw], seed: int):
        # Sharding changes the shapes of the model's own parameters.
        self._sizes = {name: (value.numel(), value.dtype) for name, value in model.named_parameters()}
        self._draws = draws
        self._seed = seed
        self.checksums: dict[str, str] = {}
        self.buffers: dict[str, torch.Tensor] = {}

    def read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements `start` to `stop` of a parameter, in row-major order.

        On the CPU, so that the values do not depend on the kind of device.
        """
        # All processes draw this block, and compare it.
        first_block = self._block(name, 0)
        self.checksums[name] = fingerprint(first_block)
        values = torch.empty(stop - start, dtype=self._sizes[name][1], device="cpu")
        for number in range(start // BLOCK, -(-stop // BLOCK)):
            first = number * BLOCK
            begin = max(start, first)
            end = min(stop, first + BLOCK)
            block = self._block(name, number) if number else first_block
            values[begin - start : end - start] = block[begin - first : end - first]
        return values

    def _block(self, name: str, number: int) -> torch.Tensor:
        size, dtype = self._sizes[name]
        operation, numbers, fills = self._draws[name]
        first = number * BLOCK
        block = torch.empty(min(size - first, BLOCK), dtype=dtype, device="cpu")
        if operation in RANDOM:
            getattr(nn.init, operation)(block, *numbers, generator=self._generator(name, number))
        else:
            getattr(block, operation)(*numbers)
        for begin, end, value in fills:
            block[max(begin - first, 0) : max(end - first, 0)] = value
        return block

    def _generator(self, name: str, number: int) -> torch.Generator:
        """The generator of a block: the first block's begins with a seed, each other's with a whole state.

        Torch uses 32 bits of a seed. A large model has so many blocks that two of them would get the same.
        """
        generator = torch.Generator().manual_seed(derive_seed(self._seed, "weights", name))
        if number:
            text = f"{self._seed}/weights/{name}/{number}"
            words = np.frombuffer(hashlib.shake_128(text.encode()).digest(4 * TWISTER_WORDS), dtype="<u4")
            state = generator.get_state()
            state[TWISTER_OFFSET : TWISTER_OFFSET + 8 * TWISTER_WORDS].numpy().view(np.uint64)[:] = words
            generator.set_state(state)
        return generator


class _InitRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the last in-place operation on each tensor on the meta device, which is its initialization."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # With the storage itself, so that no later tensor gets the address of a freed one.
        self._last_operations: dict[int, tuple[torch.UntypedStorage, Draw | str]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        result = func(*args, **kwargs)
        operation = func._schema.name.removeprefix("aten::")
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            tensor = given.get(argument.name)
            if argument.is_write and isinstance(tensor, torch.Tensor) and tensor.is_meta:
                is_repeatable = operation in REPEATABLE and not kwargs.keys() - {"generator"}
                self.record(tensor, operation, tuple(map(float, args[1:])) if is_repeatable else None)
        if operation == "constant_pad_nd" and args[0].is_meta and not any(args[1]):
            # `transformers` replaces an output layer's bias with itself, padded with nothing.
            self._last_operations[storage_of(result)] = (result.untyped_storage(), self._last_operation_on(args[0]))
        return result

    def record(self, tensor: torch.Tensor, operation: str, numbers: tuple[float, ...] | None = None) -> None:
        """Note an operation on a tensor on the meta device; with its numbers if it can be repeated."""
        draw: Draw | str = operation
        if tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes():
            whole = self._last_operation_on(tensor)
            start = int(tensor.storage_offset())
            draw = f"{operation} of a part"
            if isinstance(whole, Draw) and numbers is not None and operation in FILLS and tensor.is_contiguous():
                fill = (start, start + tensor.numel(), numbers[0] if numbers else 0.0)
                draw = whole._replace(fills=(*whole.fills, fill))
        elif numbers is not None:
            draw = Draw(operation, numbers)
        self._last_operations[storage_of(tensor)] = (tensor.untyped_storage(), draw)

    def _last_operation_on(self, tensor: torch.Tensor) -> Draw | str:
        _, draw = self._last_operations.get(storage_of(tensor), (None, "nothing"))
        return draw

    def draw_of(self, name: str, parameter: torch.Tensor) -> Draw:
        draw = self._last_operation_on(parameter)
        if isinstance(draw, str):
            raise BackendMismatch(
                f"the model's parameter {name} would start with values that do not follow from its name: the last "
                f"in-place operation on it, after its module has registered it, is {draw}; initialize it with one of "
                f"{', '.join(REPEATABLE)}, as torch.nn.init does"
            )
        return draw


@contextmanager
def _initializers_on_meta(recorder: _InitRecorder) -> Iterator[None]:
    """Record calls of those functions of `torch.nn.init` that do nothing to a tensor on the meta device."""
    truncated_normal = nn.init._no_grad_trunc_normal_

    # Libraries may have imported `trunc_normal_`, which calls this.
    def record_or_draw(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        if not tensor.is_meta:
            return truncated_normal(tensor, mean, std, a, b, generator)
        recorder.record(tensor, "trunc_normal_", (mean, std, a, b))
        return tensor

    nn.init._no_grad_trunc_normal_ = record_or_draw
    try:
        with _SkippedInitializers(recorder):
            yield
    finally:
        nn.init._no_grad_trunc_normal_ = truncated_normal


class _SkippedInitializers(TorchFunctionMode):
    """Records the functions of `torch.nn.init` that ask whether a tensor is on the meta device, and then return."""

    def __init__(self, recorder: _InitRecorder):
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func == ASKS_FOR_META and result:
            caller = sys._getframe(1)
            # Other modes, as of `torch.device`, may be in between.
            while caller.f_back and caller.f_globals.get("__name__", "").startswith("torch.utils."):
                caller = caller.f_back
            if caller.f_globals.get("__name__") == nn.init.__name__:
                self._recorder.record(args[0], caller.f_code.co_name)
        return result


@torch.no_grad()
def perturb_weights(model: nn.Module, seed: int) -> None:
    """Change each weight of a model that is whole in this process by one rounding error; zeros stay zero."""
    generator = torch.Generator().manual_seed(seed)
    for weight in model.parameters():
        up = torch.randint(0, 2, weight.shape, generator=generator).to(weight)
        weight.mul_(1 + (2 * up - 1) * torch.finfo(weight.dtype).eps)


def storage_of(tensor: torch.Tensor) -> int:
    """The identity of a tensor's memory, which its views share."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Make modules register parameters on the meta device; a shared parameter remains one parameter."""
    replaced = WeakTensorKeyDictionary()

    def without_memory(_module: nn.Module, _name: str, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.is_meta:
            return parameter
        if parameter not in replaced:
            replaced[parameter] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            # What the model declares about it, such as `_no_weight_decay`.
            vars(replaced[parameter]).update(vars(parameter))
        kept: nn.Parameter = replaced[parameter]
        return kept

    # What such a hook returns is registered instead, although its declaration says otherwise.
    hook = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()

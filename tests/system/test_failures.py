"""The kinds of failures."""

import pytest
import torch

from largebatch.errors import ConfigError, TrainingFailed
from largebatch.system.failures import building_the_model, kind_of


def raised_from(error, cause):
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ModuleNotFoundError("x"), "import"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (RuntimeError("CUDA error: out of memory"), "out_of_memory"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "out_of_memory"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "out_of_memory"),
        (
            torch.distributed.DistBackendError("NCCL error, unhandled cuda error: Cuda failure 2 'out of memory'"),
            "out_of_memory",
        ),
        (torch.distributed.DistBackendError("NCCL error"), "communication"),
        (torch.distributed.DistNetworkError("x"), "communication"),
        (ConnectionResetError("x"), "communication"),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1"), "communication"),
        (RuntimeError("NCCL communicator was aborted on rank 1"), "communication"),
        (OSError(28, "No space left on device"), "files"),
        (raised_from(RuntimeError("x"), OSError(5, "Input/output error")), "files"),
        (RuntimeError("cannot read 'out of memory.jpg'"), "error"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), "error"),
        (KeyError("gloo"), "error"),
        (ConfigError("seed: missing"), "refused"),
        (TrainingFailed("the loss is nan"), "training"),
    ],
)
def test_kinds(error, kind):
    assert kind_of(error) == kind


@pytest.mark.parametrize(("error", "kind"), [(KeyError("x"), "model"), (OSError("x"), "files")])
def test_an_error_while_the_model_is_built(error, kind):
    with pytest.raises(type(error)) as caught, building_the_model():
        raise error
    assert kind_of(caught.value) == kind

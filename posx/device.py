"""Which device and number type a run uses; what the machine cannot do well is refused."""

import torch

from posx.errors import UserError

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def pick_device(name: str) -> torch.device:
    """`auto` (a GPU where there is one), `cpu`, `cuda` or `cuda:1`.

    Raises:
        UserError: an unknown name, or a GPU that is not there.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device={name} is not known: use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device={name}: there are {torch.cuda.device_count()} GPUs here; use auto or cpu"
        )
    return device


def device_name(device: torch.device) -> str:
    """The device as it is recorded: with the name of the GPU, if it is one."""
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device)


def pick_dtype(name: str, device: str) -> torch.dtype:
    """The number type of matrix products.

    Raises:
        UserError: bfloat16 on a CPU without instructions for it, where it is about 80 times slower.
    """
    if name == "bfloat16" and pick_device(device).type == "cpu" and not cpu_has_bfloat16():
        raise UserError(
            "dtype=bfloat16: this CPU has no instructions for it and would be about 80 times "
            "slower; use dtype=float32"
        )
    return DTYPES[name]


def weight_dtype(dtype: torch.dtype) -> torch.dtype:
    """The number type of weights: never half precision, in which a running mean stands still and
    small updates are lost."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def precision(dtype: torch.dtype, device: torch.device) -> torch.autocast:
    """A context for forward passes in which matrix products have the number type `dtype`."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


def cpu_has_bfloat16() -> bool:
    """Whether matrix products in bfloat16 are fast here (AVX512-BF16 or AMX)."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_bf16_supported()

"""Shared by several kernels' launchers: powers of two, integers to the device, the interpreter.

Holds no state and launches nothing. Called by the files beside it.
"""

import numpy as np
import torch
import triton
from numpy.typing import NDArray

# Under the interpreter numpy computes, which has no bfloat16: kernels then multiply in float32.
IS_INTERPRETED = bool(triton.knobs.runtime.interpret)


def power_of_2(n: int) -> int:
    """The smallest power of two that is not below n; tile sizes must be powers of two."""
    return 1 << max(0, n - 1).bit_length()


def to_device(values: NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """int32 values on the device, copied after what was launched before; the host does not wait.

    The pinned source may be dropped at once: torch's pinned allocator keeps it until the copy ends.
    """
    host = torch.from_numpy(values)
    if device.type == "cpu":
        return host
    return host.pin_memory().to(device, non_blocking=True)

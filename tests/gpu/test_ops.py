"""tests/kernels' suites, on the device: the same functions, with this folder's fixtures."""

from __future__ import annotations

import pytest

from tests.gpu.on_device import require_cuda

require_cuda()

from tests.kernels.gpu.test_attention import *  # noqa: E402, F403
from tests.kernels.gpu.test_decode_step import *  # noqa: E402, F403
from tests.kernels.gpu.test_linear import *  # noqa: E402, F403
from tests.kernels.gpu.test_mixed_step import *  # noqa: E402, F403
from tests.kernels.gpu.test_sample import *  # noqa: E402, F403
from tests.kernels.test_attention import *  # noqa: E402, F403
from tests.kernels.test_linear import *  # noqa: E402, F403
from tests.kernels.test_ops import *  # noqa: E402, F403
from tests.kernels.test_quantized import *  # noqa: E402, F403

pytestmark = pytest.mark.usefixtures("backend")

"""The protocol's own tests against a server over two replicas; `make cluster-tests` runs more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.conftest import bundled, server, server_with, slow  # noqa: F401
from tests.server.responses.test_resume import *  # noqa: F403
from tests.server.responses.test_socket import *  # noqa: F403
from tests.server.responses.test_socket_resume import *  # noqa: F403
from tests.server.support.running import Running


@pytest.fixture(scope="module", autouse=True)
def _over_replicas() -> Iterator[None]:
    before, Running.num_replicas = Running.num_replicas, 2
    yield
    Running.num_replicas = before

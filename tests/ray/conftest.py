"""Ray is an extra: without it there is nothing to collect here; `make ray-tests` installs it."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("ray") else ["test_*.py"]

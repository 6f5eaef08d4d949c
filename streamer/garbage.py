"""Python's garbage collector, held back while a CUDA graph is recorded or a pattern's time counts.

It has one switch for the whole process: here it is off while any thread holds it, and afterwards
as it was before. Called by tokenizer/patterns.py and model/runner/device.py, on any thread.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Switch:
    """The collector's, and the threads that hold it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Of a thread that was interrupted before it left, the next time makes up for it.
        self._threads: set[int] = set()
        self._was_enabled = True

    @contextmanager
    def no_collections(self) -> Iterator[None]:
        """No garbage is collected meanwhile, on any thread; not to be nested in one."""
        thread = threading.get_ident()
        with self._lock:
            if not self._threads:
                self._was_enabled = gc.isenabled()
            self._threads.add(thread)
            gc.disable()
        try:
            yield
        finally:
            with self._lock:
                self._threads.discard(thread)
                if not self._threads and self._was_enabled:
                    gc.enable()


no_collections = _Switch().no_collections

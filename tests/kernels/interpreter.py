"""Triton's interpreter, in two thirds of its time: names are patched once a launch.

While a kernel is interpreted, triton.language's names are replaced. The interpreter (3.7) does so
at the launch, and again at each call of a function that the kernel uses; only what the launch
replaced is put back. Here a call replaces what no earlier one of the launch did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


@functools.cache
def patch_once() -> None:
    """Change the interpreter of this process."""
    import triton.language as tl
    from triton.runtime import interpreter

    patch: Callable[[Any], Any] = interpreter._patch_lang
    modules = {id(tl), id(tl.core)}
    patched = set[int]()

    @functools.cache
    def used(fn: Any) -> set[int]:
        return modules & {id(value) for value in fn.__globals__.values()}

    def patch_lang(fn: Any) -> Any:
        if patched and used(fn) <= patched:
            return interpreter._LangPatchScope()  # of nothing
        is_launch = not patched
        scope = patch(fn)
        patched.update(used(fn))
        if is_launch:
            put_back = scope.restore

            def restore() -> None:
                patched.clear()
                put_back()

            scope.restore = restore
        return scope

    interpreter._patch_lang = patch_lang

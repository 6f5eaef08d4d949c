"""The GPU backend: Triton kernels, one op one file, in rooms by subject; backend.py is the Backend.

Imported on first use, since triton is not installed everywhere. Nothing here waits for the device:
a launch's arguments are known on the host, or the kernel reads them. With TRITON_INTERPRET=1, set
before triton is imported, the same kernels run on CPU tensors; that is how they are tested without
a GPU. Numbers called unmeasured were chosen without a GPU.
"""

"""Config: every setting of an engine and its server, in one frozen value.

Flags, environment variables (STREAMER_...) and TOML keys derive from these fields; nothing else in
the project reads the environment or a file for settings. Names are vLLM's where it has one.
"""

from __future__ import annotations

import msgspec


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings. None means "found out at start" (from the checkpoint or the machine)."""

    # the model
    model: str | None = None  # folder or hub id; None: the bundled model; "fake": no torch
    served_model_name: str | None = None
    revision: str | None = None
    dtype: str = "auto"  # auto, float32, bfloat16
    device: str = "auto"  # auto, cpu
    max_model_len: int | None = None
    chat_template: str | None = None  # path of a Jinja file, instead of the checkpoint's
    seed: int | None = None  # of the seeds drawn for requests that name none
    load_progress: bool = True  # progress bars while loading

    # scheduling and memory
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.5  # share of the free memory that the KV pool may take
    swap_space: float = 0.25  # GiB of the host pool
    enable_prefix_caching: bool = True

    # the server
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_key: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()  # besides the server's own
    allowed_hosts: tuple[str, ...] = ()  # besides localhost and the bind address
    allow_public_bind: bool = False  # a public bind without a key
    root_path: str = ""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    log_level: str = "info"
    max_queue: int = 1024  # requests waiting, beyond which 503
    stream_window: int = 512  # tokens a reader may lag before its sequence pauses; 0: none
    detach_timeout: float = 30.0  # seconds a response outlives its last socket
    pause_timeout: float = 60.0  # seconds a paused reader is kept attached
    retain_s: float = 600.0  # finished responses are kept so long
    retain_bytes: int = 64 << 20

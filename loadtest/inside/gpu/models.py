"""Models for `streamer bench gpu`: known shapes with random weights, made on their device.

No file and no checkpoint: RandomWeights is a WeightSource of model/layers.py. Bed is such a model
behind the real scheduler and runner, stepped by this thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from streamer.core.blocks import BlockHasher
from streamer.core.plan import Add, StepOutput
from streamer.core.sampling import SamplingParams
from streamer.core.scheduler import Scheduler, SchedulerConfig

if TYPE_CHECKING:
    from streamer.kernels.weights import Weight
    from streamer.model.decoder import Decoder
    from streamer.model.families import DecoderConfig
    from streamer.model.runner.cpu import CpuRunner
    from streamer.model.runner.cuda import CudaRunner
    from streamer.model.runner.device import Device
    from streamer.model.runner.interface import RunnerSizes

BLOCK_SIZE = 16
GROUP = 32  # columns of a scale of codes
SPREAD = 0.02  # standard deviation of the weights
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# config.json of the checkpoints of that name, as far as it gives the model its shape.
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": True,
    },
    "Llama-3.2-1B": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {**LLAMA3, "factor": 32.0},
        "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {**LLAMA3, "factor": 8.0},
        "tie_word_embeddings": False,
    },
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
}


class Where(msgspec.Struct, frozen=True):
    """The models' device, and whether tiny stand-ins replace the shapes."""

    device: torch.device
    is_tiny: bool

    @property
    def dtype(self) -> torch.dtype:
        """bfloat16; for tiny ones on a CPU float32, whose sums do not depend on the machine."""
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def config_of(self, name: str) -> dict[str, Any]:
        """config.json of a shape."""
        return {**SHAPES[name], **(TINY if self.is_tiny else {})}

    def new_device(self) -> Device | None:
        """The device in the form that a runner takes; None: the CPU."""
        from streamer.model.runner.device import CudaDevice

        return None if self.device.type == "cpu" else CudaDevice(self.device)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class RandomWeights:
    """A WeightSource of normal numbers, norms of one. Drawn on the device, in its dtype, or as
    codes of 4 bits."""

    def __init__(self, config: DecoderConfig, where: Where, *, is_4_bit: bool = False) -> None:
        from streamer.model.families import expected_tensors

        self._is_4_bit = is_4_bit
        self.dtype = where.dtype
        self.device = where.device
        self._shapes = dict(expected_tensors(config))
        self._random = torch.Generator(where.device).manual_seed(0)

    def take(self, name: str) -> torch.Tensor:
        """See layers.WeightSource."""
        shape = self._shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        weight = torch.empty(shape, dtype=self.dtype, device=self.device)
        return weight.normal_(0.0, SPREAD, generator=self._random)

    def weight(self, module: str) -> Weight:
        """See layers.WeightSource."""
        from streamer.kernels.weights import QuantizedWeight

        name = f"{module}.weight"
        if not self._is_4_bit:
            return self.take(name)
        n, k = self._shapes[name]
        codes = torch.randint(
            0, 16, (n, k), dtype=torch.uint8, device=self.device, generator=self._random
        )
        # 4.6 is the standard deviation of codes
        scales = torch.full((n, k // GROUP), SPREAD / 4.6, device=self.device)
        return QuantizedWeight(codes=codes, scales=scales, group=GROUP, bits=4, zero=8)

    def layer_done(self) -> None:
        """See layers.WeightSource."""


class Model(msgspec.Struct, frozen=True):
    """A decoder, and the bytes of weights that one of its decode steps reads."""

    name: str
    decoder: Any  # Decoder: msgspec looks types up when the class is made
    step_bytes: int


def make_model(name: str, where: Where, *, is_4_bit: bool = False) -> Model:
    """The random model of a shape."""
    from streamer.kernels import ops
    from streamer.model.decoder import Decoder
    from streamer.model.families import parse_config

    config = parse_config(where.config_of(name))
    kernels = ops.choose(where.device)
    if where.device.type == "cpu":
        kernels.set_threads(1)
    with torch.inference_mode():
        decoder = Decoder(kernels, config, RandomWeights(config, where, is_4_bit=is_4_bit))
    where.synchronize()  # a runner computes in a stream of its own
    bits = 4 + 8 * where.dtype.itemsize / GROUP if is_4_bit else 8 * where.dtype.itemsize
    return Model(name, decoder, round(read_elements(config) * bits / 8))


def read_elements(config: DecoderConfig) -> int:
    """Weight elements that a decode step reads: all but an embedding not tied to the head."""
    from streamer.model.families import expected_tensors

    sizes = {name: math.prod(shape) for name, shape in expected_tensors(config)}
    unread = 0 if config.tied else sizes["model.embed_tokens.weight"]
    return sum(sizes.values()) - unread


class Bed:
    """A model with the real scheduler and runner, for requests of known sizes.

    is_recorded  whether a GPU replays steps, or launches them op by op
    """

    def __init__(
        self,
        model: Model,
        where: Where,
        sizes: RunnerSizes,
        *,
        is_recorded: bool = True,
    ) -> None:
        from streamer.engine.core import EngineCore, Inbox

        runner = new_runner(model.decoder, where, sizes, is_recorded=is_recorded)
        self._inbox = Inbox()
        config = SchedulerConfig(
            block_size=sizes.block_size,
            num_blocks=sizes.num_blocks,
            num_host_blocks=sizes.num_host_blocks,
            block_bytes=runner.block_bytes,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
            max_model_len=sizes.max_model_len,
        )
        scheduler = Scheduler(config, BlockHasher(sizes.block_size, b"b" * 32))
        self._core = EngineCore(runner, scheduler, self._inbox)
        self._num_added = 0

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        temperature: float,
        *,
        has_filters: bool = False,
    ) -> None:
        """Add a request that ends only at `max_tokens`; `has_filters`: with top_k and top_p."""
        self._num_added += 1
        params = SamplingParams(
            temperature=temperature,
            seed=self._num_added,
            max_tokens=max_tokens,
            ignore_eos=True,
            top_k=50 if has_filters else 0,
            top_p=0.9 if has_filters else 1.0,
        )
        self._inbox.put(Add(str(self._num_added), tuple(prompt), params))

    def step(self) -> StepOutput | None:
        """One step; None when all requests have ended."""
        return self._core.step()

    def close(self) -> None:
        """Free the pools."""
        self._core.close()


def new_runner(
    decoder: Decoder, where: Where, sizes: RunnerSizes, *, is_recorded: bool = True
) -> CpuRunner | CudaRunner:
    """The device's runner for a loaded decoder; on a GPU with recorded steps."""
    from streamer.kernels import ops
    from streamer.model.runner.cpu import CpuRunner
    from streamer.model.runner.cuda import CudaRunner, StepBytes

    device = where.new_device()
    if device is None:
        return CpuRunner(ops.for_cpu(), decoder, sizes)
    runner = CudaRunner(device, ops.choose(where.device), decoder, sizes)
    runner.warm()
    if not is_recorded:
        return runner
    # The pools were made for what will run, so the rest of the memory is free for other steps.
    runner.record(StepBytes(0, 0), show_progress=False)
    return runner


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold `num_tokens` of one sequence."""
    return -(-num_tokens // BLOCK_SIZE)

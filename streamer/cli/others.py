"""What vLLM, llama.cpp and Ollama call a flag or a command, and what that is here.

Two tables and their look-up, for the errors about a name that does not exist: nothing here is
accepted in place of ours.
"""

from __future__ import annotations

from collections.abc import Container

# Their flag -> ours of the same meaning, or what there is in its place.
_FLAGS = {
    "--ctx-size -c --context-length": "--max-model-len",
    "--parallel -np": "--max-num-seqs",
    "--alias -a": "--served-model-name",
    "-tp --tp --tp-size": "--tensor-parallel-size",
    "--data-parallel-size -dp": "--replicas",
    "--batch-size -b": "--max-num-batched-tokens",
    "--cache-type-k --cache-type-v -ctk -ctv": "--kv-cache-dtype",
    "--model-draft -md": "--speculative-model",
    "--n-predict --predict -n": "--max-tokens",
    "--temp": "--temperature",
    "--repeat-penalty": "--repetition-penalty",
    "--system-prompt -sys": "--system",
    "--uvicorn-log-level": "--log-level",
    "--hf-repo -hf -hfr -m --model-path": "the model is the first argument (of generate --model)",
    "--prompt -p": "the prompt is the first argument of generate",
    "--threads -t": "the environment variable OMP_NUM_THREADS sets them",
    "--kv-cache-memory-bytes": "the KV pool is sized by --gpu-memory-utilization, or in blocks by "
    "--num-gpu-blocks-override",
    "--pipeline-parallel-size -pp": "a model is split by --tensor-parallel-size alone",
    "--n-gpu-layers --gpu-layers -ngl --cpu-offload-gb": "the whole model is where --device says",
    "--trust-remote-code": "code of a checkpoint never runs",
    "--enable-auto-tool-choice --enable-chunked-prefill --cont-batching -cb": "it is always on",
    "--jinja": "the chat template is always used",
    "--enforce-eager": "no setting turns the recording of steps off",
    "--load-format": "it is safetensors or GGUF, as the files are",
    "--tokenizer --tokenizer-mode": "the checkpoint's own is used",
    "--generation-config": "defaults are those of the checkpoint's generation_config.json",
    "--enable-lora --lora-modules --lora": "adapters are not served: merge them into the model",
    "--guided-decoding-backend --structured-outputs-config": "there is one backend, llguidance",
    "--disable-log-requests --enable-log-requests": "each finished request has a line in the log, "
    "and prompts only with --log-prompts",
    "--download-dir": "the environment variable HF_HOME sets the hub's cache",
    "--hf-token -hft": "the environment variable HF_TOKEN has it",
}
_COMMANDS = {
    "run": "`streamer chat MODEL`",
    "complete": "`streamer generate PROMPT`",
    "show": "`streamer info MODEL`",
    "server start": "`streamer serve MODEL`",
    "pull download": "`streamer serve OWNER/NAME` fetches what the hub's cache does not have",
    "list ls ps": "no list is kept; `hf cache ls` has the models that were fetched",
    "help": "`streamer --help`",
    "version": "`streamer --version`",
}
FLAGS = {name: ours for names, ours in _FLAGS.items() for name in names.split()}
COMMANDS = {name: ours for names, ours in _COMMANDS.items() for name in names.split()}


def flag_here(flag: str, known: Container[str]) -> str:
    """What a flag of another engine is here, or "". `known`: the flags of this command."""
    ours = FLAGS.get(flag.replace("_", "-"), "")
    if not ours.startswith("--"):
        return ours
    return f"it is {ours} here" if ours in known else ""

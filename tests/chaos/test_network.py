"""No connection leaves the machine that was not asked for, from a program's start to its end.

The programs are a server, `streamer generate`, `streamer chat` and the Python class. A library
before libc sees every address that is looked up, bound, connected or sent to, also by native code,
and refuses all but this machine's.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from streamer.kernels.cpu.library import _compiler
from tests.chaos.killable import ROOT, free_port
from tests.checkpoints import make_checkpoint
from tests.model.gguf_files import gguf_alphabet, write_gguf

SOURCE = r"""
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#ifndef RTLD_NEXT
#define RTLD_NEXT ((void *)-1L)
#endif

static int is_refused(const char *what, const char *name) {
    const char *ours[] = {"::1", "localhost", "unix", "none"};
    const char *number = strncmp(name, "::ffff:", 7) ? name : name + 7;
    int found = !strncmp(number, "127.", 4) && !number[strspn(number, "0123456789.")];
    for (size_t i = 0; i < sizeof ours / sizeof *ours; i++)
        found |= !strcmp(name, ours[i]);
    dprintf(2, "SEEN %s %s %s\n", found ? "ours" : "STRANGER", what, name);
    errno = ENETUNREACH;
    return !found;
}

static int is_stranger(const char *what, const struct sockaddr *to) {
    char name[INET6_ADDRSTRLEN] = "unix";
    if (to && to->sa_family == AF_INET)
        inet_ntop(AF_INET, &((struct sockaddr_in *)to)->sin_addr, name, sizeof name);
    if (to && to->sa_family == AF_INET6)
        inet_ntop(AF_INET6, &((struct sockaddr_in6 *)to)->sin6_addr, name, sizeof name);
    return is_refused(what, name);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int connect(int fd, const struct sockaddr *to, socklen_t size) {
    return is_stranger("connect", to) ? -1 : REAL(connect)(fd, to, size);
}
int bind(int fd, const struct sockaddr *to, socklen_t size) {
    return is_stranger("bind", to) ? -1 : REAL(bind)(fd, to, size);
}
ssize_t sendto(int fd, const void *data, size_t n, int flags, const struct sockaddr *to,
               socklen_t size) {
    return to && is_stranger("sendto", to) ? -1 : REAL(sendto)(fd, data, n, flags, to, size);
}
ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    return message->msg_name && is_stranger("sendmsg", message->msg_name)
        ? -1 : REAL(sendmsg)(fd, message, flags);
}
int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints,
                struct addrinfo **found) {
    return is_refused("getaddrinfo", node ? node : "none")
        ? EAI_FAIL : REAL(getaddrinfo)(node, service, hints, found);
}
"""
# Of Python's own sockets, of native code's, of names that are looked up, and one open to all.
STRANGERS = """
import contextlib, ctypes, socket
with contextlib.suppress(OSError):
    socket.socket().connect(("192.0.2.1", 80))
with contextlib.suppress(OSError):
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("192.0.2.2", 53))
with contextlib.suppress(OSError):
    socket.getaddrinfo("example.invalid", 80)
with contextlib.suppress(OSError):
    socket.getaddrinfo("localhost.example.invalid", 80)
with contextlib.suppress(OSError):
    socket.getaddrinfo("127.example.invalid", 80)
with contextlib.suppress(OSError):
    socket.socket().bind(("0.0.0.0", 0))
address = socket.AF_INET.to_bytes(2, "little") + bytes((0, 80, 192, 0, 2, 3)) + bytes(8)
libc = ctypes.CDLL(None)
assert libc.connect(libc.socket(2, 1, 0), address, 16) == -1
"""
COMMAND = "import streamer.cli; assert streamer.cli.main({}) == 0"
LLM = """
from streamer import LLM, SamplingParams
short = SamplingParams(max_tokens=4)
with LLM(dtype="float32", num_gpu_blocks_override=64, max_model_len=512) as llm:
    print(llm.generate("http://example.com/x", short)[0].text)
    print(llm.chat([{"role": "user", "content": "x"}], short)[0].text)
"""
MARKED = "\nimport socket; socket.getaddrinfo('localhost', 80)"  # it was watched until here


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which every address is seen."""
    folder = tmp_path_factory.mktemp("network")
    (folder / "seen.c").write_text(SOURCE)
    command = [*_compiler(), *shlex.split("-shared -fPIC -O1 seen.c -o seen.so -ldl")]
    subprocess.run(command, cwd=folder, check=True)
    given = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}  # which the tests set
    return {**given, "LD_PRELOAD": str(folder / "seen.so")}


def seen(output: str, whose: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(f"SEEN {whose}")]


def speaks_to_nobody(watched: dict[str, str], command: list[str]) -> None:
    """A command of `streamer` that answers a question, or without one the Python class."""
    program = COMMAND.format([*command, "--max-tokens", "4"]) if command else LLM
    done = subprocess.run(
        [sys.executable, "-c", program + MARKED],
        input="Who is http://example.com/x?\n",
        env=watched,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip()
    assert seen(done.stderr, "ours getaddrinfo localhost")
    assert seen(done.stderr, "STRANGER") == []


def gguf_file(folder: Path) -> Path:
    checkpoint = make_checkpoint(folder / "m", "llama", intermediate_size=128)
    return write_gguf(checkpoint, folder / "m.gguf")


def of_transformers(folder: Path) -> Path:
    """A model that runs in transformers, and a tokenizer that it converts."""
    characters = gguf_alphabet()
    vocabulary = {character: i for i, character in enumerate(characters)}
    make_checkpoint(folder / "m", "gpt2")
    (folder / "m" / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "m" / "merges.txt").write_text("#version: 0.2\n")
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), characters[2])
    settings = json.dumps({"tokenizer_class": "GPT2Tokenizer", **special})
    (folder / "m" / "tokenizer_config.json").write_text(settings)
    return folder / "m"


MODELS: dict[str, Callable[[Path], list[Path]]] = {
    "bundled": lambda _: [],
    "GGUF": lambda folder: [gguf_file(folder)],
    "transformers": lambda folder: [of_transformers(folder)],
}


@pytest.mark.parametrize("model", MODELS)
def test_a_server_speaks_to_its_clients_alone(
    tmp_path: Path, watched: dict[str, str], model: str
) -> None:
    port = free_port()
    served = map(str, MODELS[model](tmp_path))
    command = ["serve", *served, "--port", str(port), "--no-load-progress", "--dtype", "float32"]
    command += ["--served-model-name", "served", "--max-model-len", "512"]
    command += ["--num-gpu-blocks-override", "64", "--journal", str(tmp_path / "journal")]
    command = [sys.executable, "-m", "streamer", *command]
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=ROOT, env=watched)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20.0) as client:
            while True:
                assert process.poll() is None, log.read_text()[-2000:]
                try:
                    if client.get("/ready").status_code == 200:
                        break
                except httpx.ConnectError:
                    continue
            body = {"model": "served", "prompt": "http://example.com/x", "max_tokens": 4}
            client.post("/v1/completions", json=body).raise_for_status()
            if model == "bundled":  # the others have no chat template
                chat = {"messages": [{"role": "user", "content": "http://example.com/x"}]}
                short = {"max_tokens": 4, "model": "served"}
                client.post("/v1/chat/completions", json={**chat, **short}).raise_for_status()
                body = {"model": "served", "input": "x", "max_output_tokens": 4}
                client.post("/v1/responses", json=body).raise_for_status()
            client.get("/")
            if model == "bundled":
                speaks_to_nobody(watched, ["chat", "--url", str(client.base_url)])
    finally:
        process.terminate()
        assert process.wait(30.0) == 0, log.read_text()[-2000:]
    assert seen(log.read_text(), "ours bind")
    assert seen(log.read_text(), "STRANGER") == []


@pytest.mark.parametrize("program", ["generate", "chat", "LLM"])
def test_an_answer_in_process_speaks_to_nobody(watched: dict[str, str], program: str) -> None:
    speaks_to_nobody(watched, [] if program == "LLM" else [program])


def test_strangers_are_seen_and_refused(watched: dict[str, str]) -> None:
    command = [sys.executable, "-c", STRANGERS]
    done = subprocess.run(command, env=watched, stderr=subprocess.PIPE, text=True, check=True)
    names = [line.rpartition(" ")[2] for line in seen(done.stderr, "STRANGER")]
    looked_up = ["example.invalid", "localhost.example.invalid", "127.example.invalid"]
    assert names == ["192.0.2.1", "192.0.2.2", *looked_up, "0.0.0.0", "192.0.2.3"]

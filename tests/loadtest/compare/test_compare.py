"""compare itself: the turns, the effect of a failure, and one whole small run."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from streamer.cli import main
from streamer.errors import ConfigError
from streamer.loadtest.compare import command as compare
from streamer.loadtest.compare import machine, turns
from streamer.loadtest.compare.engines import (
    ENGINES,
    Engine,
    Places,
    environment,
    server_command,
    setup,
)
from streamer.loadtest.compare.limit import Machine
from streamer.loadtest.compare.peers.to_gguf import gguf_name, rotated, tensors
from streamer.loadtest.compare.results import Failure, Results, Sample
from streamer.loadtest.compare.turns import Runner
from streamer.loadtest.compare.workload import KV_BYTES, MODELS, WORKS
from streamer.loadtest.processes import EngineFailed, Process, family

SMALL = MODELS["small"]
OURS, VLLM, STATIC = ENGINES["streamer"], ENGINES["vllm"], ENGINES["transformers"]


def plan(*engines: Engine, rounds: int = 2) -> compare.Plan:
    return compare.Plan(engines, ("small",), tuple(WORKS), rounds, 2, False)


def test_engines_take_turns_and_the_first_changes() -> None:
    requested = plan(OURS, VLLM, STATIC)
    kinds = [(t.engine.name, t.is_served) for t in compare.turns(requested, 0)]
    assert kinds == [
        ("streamer", False),
        ("streamer", True),
        ("vllm", False),
        ("vllm", True),
        ("transformers", False),  # transformers' static batch has no server
    ]
    served = compare.turns(requested._replace(is_served=True), 0)
    assert [(t.engine.name, len(t.works), t.is_served) for t in served] == [
        ("streamer", len(WORKS), True),
        ("vllm", len(WORKS), True),
        ("transformers", len(WORKS) - 1, False),
    ]
    assert [len(t.works) for t in compare.turns(plan(ENGINES["llamacpp"]), 0)] == [len(WORKS)]
    assert next(compare.turns(requested, 1)).engine is VLLM
    assert next(compare.turns(requested, 3)).engine is OURS


def test_a_far_slower_engine_is_left_out_of_later_rounds() -> None:
    results = Results("", {}, {}, {})
    for engine, rate in (("streamer", 10.0), ("vllm", 100.0), ("transformers", 20.0)):
        results.samples += [Sample(engine, "small", work, 0, rate) for work in ("eq", "mix")]
    results.samples.append(Sample("transformers", "small", "one", 0, 20.0))
    kept = {
        turn.engine.name: [work.name for work in compare.without_slow(turn, results).works]
        for turn in compare.turns(plan(OURS, VLLM, STATIC), 1)
        if not turn.is_served
    }
    everything = ["eq", "mix", "one", "prompt"]
    assert kept == {"streamer": everything, "vllm": everything, "transformers": ["one", "prompt"]}


def test_missing_engines_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = compare.choose(["streamer", "vllm"], Places(tmp_path), Console(soft_wrap=True))
    assert found == (OURS,)
    assert "vllm" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="none of these is installed"):
        compare.choose(["vllm"], Places(tmp_path), Console())


def test_pools_have_the_same_bytes(tmp_path: Path) -> None:
    places = Places(tmp_path)
    half = MODELS["half"]
    assert setup(OURS, half, places, 2).kv_bytes == KV_BYTES
    ours = server_command(OURS, half, places, 2, 1)
    blocks = int(ours[ours.index("--num-gpu-blocks-override") + 1])
    llama = server_command(ENGINES["llamacpp"], half, places, 2, 1)
    context = int(llama[llama.index("-c") + 1])
    pages = server_command(ENGINES["transformers-cb"], half, places, 2, 1)
    tokens = 256 * int(pages[pages.index("--cb-num-blocks") + 1])
    for pool_tokens in (16 * blocks, context, tokens):
        size = pool_tokens * half.kv_token_bytes
        assert KV_BYTES * 0.98 < size <= KV_BYTES
    assert environment(VLLM, places, 2)["VLLM_CPU_KVCACHE_SPACE"] == "2"


def test_quantized_engines_read_their_own_files(tmp_path: Path) -> None:
    places = Places(tmp_path)
    ours, theirs, fly = (
        server_command(ENGINES[name], SMALL, places, 2, 1)
        for name in ("streamer-q4_k_m", "llamacpp-q4_k_m", "streamer-int4")
    )
    file = str(tmp_path / "models" / "small-Q4_K_M.gguf")
    assert file in ours
    assert file in theirs
    assert places.checkpoint(SMALL) in fly
    assert fly[fly.index("--quantization") + 1] == "int4"
    cached = server_command(ENGINES["streamer-int4-kv8"], SMALL, places, 2, 1)
    assert cached[cached.index("--kv-cache-dtype") + 1] == "int8"
    blocks = [int(c[c.index("--num-gpu-blocks-override") + 1]) for c in (fly, cached)]
    assert blocks[1] == 2 * blocks[0]
    assert compare.columns([4])[0] == "streamer"
    assert "openvino-int4" in compare.columns([4])
    assert "vllm" not in compare.columns([4])
    written = str(tmp_path / "models" / "small-int4")
    assert written in server_command(ENGINES["vllm-int4"], SMALL, places, 2, 1)
    assert places.source(ENGINES["vllm"], SMALL) == places.checkpoint(SMALL)


def test_what_engines_read_packed_is_written_by_quantize(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once; other engines make their own codes of the dense checkpoint."""
    places, commands = Places(tmp_path), []
    Path(places.checkpoint(SMALL)).mkdir(parents=True)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
    names = ("streamer-int4", "vllm", "vllm-int8", "streamer-int4-g128-kv8", "zentorch-symmetric")
    engines = [ENGINES[name] for name in names]
    compare.make_models([SMALL], engines, places, Console(quiet=True))
    targets = [places.written(SMALL, weights) for weights in ("int8", "int4-g128", "symmetric")]
    assert commands[2][0] == str(tmp_path / "zentorch" / "bin" / "python")
    assert commands[2][2:] == [places.checkpoint(SMALL), str(targets[2]), "symmetric"]
    words = [command[command.index("quantize") + 1 :] for command in commands[:2]]
    source, (first, second) = places.checkpoint(SMALL), map(str, targets[:2])
    assert words[0] == [source, "--to", "int8", "--out", first]
    assert words[1] == [source, "--to", "int4", "--group-size", "128", "--out", second]
    assert second in server_command(engines[-2], SMALL, places, 2, 1)
    for target in targets:
        target.mkdir()
    compare.make_models([SMALL], engines, places, Console(quiet=True))
    assert len(commands) == 3


def test_a_gguf_file_needs_llama_cpp(tmp_path: Path) -> None:
    """It ended in a traceback, with our engine alone among those asked for, once the checkpoint
    had been made."""
    places = Places(tmp_path)
    with pytest.raises(ConfigError, match=r"^small-Q4_0.gguf is .* add --install llamacpp$"):
        compare.make_models([SMALL], [ENGINES["streamer-q4_0"]], places, Console(quiet=True))
    assert not list(tmp_path.iterdir())


def test_peers_do_not_see_our_modules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    monkeypatch.setenv("STREAMER_PORT", "1")
    assert "PYTHONPATH" not in environment(VLLM, Places(tmp_path), 2)
    ours = environment(OURS, Places(tmp_path), 2)
    assert "STREAMER_PORT" not in ours
    assert (Path(ours["PYTHONPATH"]) / "streamer" / "__init__.py").exists()


def test_an_engine_that_ends_says_why(tmp_path: Path) -> None:
    """The interpreter here has no vLLM; the runner reports that."""
    places = Places(tmp_path)
    env = environment(VLLM, places, 1)
    with (
        Runner(Path(sys.executable), "run_vllm", env, tmp_path / "log") as runner,
        pytest.raises(EngineFailed, match="No module named 'vllm'"),
    ):
        runner.ask(setup(VLLM, SMALL, places, 1)._asdict(), 60)


def test_a_failure_is_a_result_and_the_engine_is_left_alone(tmp_path: Path) -> None:
    kept, out = Sample("vllm", "small", "eq", 0, 9.0), tmp_path / "r.json"

    def failing() -> Iterator[Sample]:
        yield kept
        raise EngineFailed("no")

    results = Results("", {}, {}, {})
    first, *_ = compare.turns(plan(VLLM), 0)
    later, *_ = compare.turns(plan(VLLM), 1)
    compare.take(first, failing(), results, out, Console(quiet=True))
    assert results.failures == [Failure("vllm", "small", 0, "no")]
    assert Results.read(out) == results
    assert results.samples == [kept]
    assert compare._has_failed(later, results)
    assert not compare._has_failed(first, results)


def test_a_run_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    """With what it lacks; what failed is tried again. Not on another machine."""
    new = compare.new_results(plan(OURS, VLLM))
    old = compare.new_results(plan(OURS, VLLM))
    old.samples.append(Sample("vllm", "small", "eq", 0, 9.0))
    old.failures.append(Failure("vllm", "small", 0, "no"))
    old.write(tmp_path / "r.json")
    found = compare.resumed(tmp_path / "r.json", new)
    assert found.samples == old.samples
    assert not found.failures
    first, *_ = compare.turns(plan(VLLM), 0)
    later, *_ = compare.turns(plan(VLLM), 1)
    assert compare.lacking(first, found).works == first.works[1:]
    assert compare.lacking(later, found) == later
    new.settings["threads"] = 99
    with pytest.raises(ConfigError, match="--resume"):
        compare.resumed(tmp_path / "r.json", new)


def test_memory_of_a_process_and_its_children(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "data = bytearray(50 << 20)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; print(1, flush=True); "
        "time.sleep(60)'], stdout=sys.stdout)\n"
        "time.sleep(60)\n"
    )
    log = tmp_path / "log"
    with Process([sys.executable, "-c", code], environment(OURS, Places(tmp_path), 1), log) as p:
        follower = subprocess.run(  # waits until the child has printed
            ["sh", "-c", f"for i in $(seq 300); do grep -q 1 {log} && exit; sleep 0.05; done"],
            check=False,
        )
        assert follower.returncode == 0
        pids = family(p._process.pid)
        assert len(pids) == 2
        assert 55 << 20 < p.peak_bytes() < 200 << 20
    assert not p.is_running


def test_names_and_rotation_for_llama_cpp() -> None:
    assert gguf_name("model.layers.11.self_attn.q_proj.weight") == "blk.11.attn_q.weight"
    assert gguf_name("model.embed_tokens.weight") == "token_embd.weight"
    rows = np.arange(8).reshape(8, 1)  # two heads of four: halves become pairs
    assert rotated(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_tensors_of_a_safetensors_file(tmp_path: Path) -> None:
    header = b'{"__metadata__":{},"a":{"dtype":"BF16","shape":[2,1],"data_offsets":[0,4]}}'
    file = tmp_path / "x"
    file.write_bytes(len(header).to_bytes(8, "little") + header + b"\1\0\2\0")
    ((name, bits),) = tensors(file)
    assert (name, bits.tolist()) == ("a", [[1], [2]])


def test_rates_of_threads_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "TRY_S", 0.02)
    one, two = (machine.total_rate(lambda: lambda: time.sleep(0.001), n, 3.0) for n in (1, 2))
    assert 0 < one < 3000
    assert two > 1.2 * one  # sleeping threads do not share a core


def test_of_reads_the_best_kind_counts_and_of_its_tries_what_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = [10e9, 30e9, 20e9, 1e9, 20e9, 30e9, 40e9, 1e9]  # four kinds of reads take turns
    for of, expected in ((max, 40.0), (statistics.mean, 30.0)):
        left = iter(rates)
        monkeypatch.setattr(machine, "READ_BYTES", 1 << 10)
        monkeypatch.setattr(machine, "TRIES", 2)
        monkeypatch.setattr(machine, "total_rate", lambda *_, left=left, **__: next(left))
        assert machine.read_gb_s(2, of) == expected


def test_a_single_request_is_made_three_times_between_readings_of_memory() -> None:
    done: list[str] = []

    def read() -> float | None:
        done.append("read")
        return None if len(done) == 1 else float(len(done))

    def measure(time: int) -> str:
        done.append(f"{time}")
        return done[-1]

    assert turns._measure(WORKS["one"], read, measure) == (["0", "1", "2"], 5.0)
    assert done == ["read", "0", "read", "1", "read", "2", "read"]
    assert turns._measure(WORKS["eq"], read, measure) == (["0"], None)
    assert len(done) == 8


def test_each_time_has_prompts_of_its_own() -> None:
    turn = turns.Turn(ENGINES["streamer"], MODELS["fake"], 0, (WORKS["one"],), False)
    drawn = [turn.prompts(WORKS["one"], time) for time in range(3)]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]
    assert drawn[1] == turn.prompts(WORKS["one"], 1)


def test_a_whole_run_with_the_fake_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(_plan: object, results: Results, *_: object) -> None:
        results.machine.append(Machine(40.0, {32: 600.0}))

    monkeypatch.setattr(compare, "measure_machine", measured)
    monkeypatch.setenv("PEERS_HOME", str(tmp_path / "peers"))
    out, svg, page = tmp_path / "r.json", tmp_path / "c.svg", tmp_path / "t.md"
    flags = ["--engines", "streamer", "vllm", "--models", "fake", "--work", "mix", "stream"]
    files = ["--out", str(out), "--svg", str(svg), "--markdown", str(page)]
    assert main(["loadtest", "compare", *flags, "--rounds", "1", *files]) == 0
    results = Results.read(out)
    assert [(s.engine, s.work) for s in results.samples] == [
        ("streamer", "mix"),
        ("streamer", "stream"),
    ]
    stream = results.samples[1]
    assert stream.first_p50_ms is not None
    assert 0 < stream.first_p50_ms < 10_000
    assert all(peak.bytes > 10 << 20 for peak in results.peaks)
    assert not results.failures
    assert "| Streamer |" in page.read_text(encoding="utf-8")
    assert svg.read_text(encoding="utf-8").startswith("<svg")
    assert "Left out, not installed: vllm" in capsys.readouterr().out
    assert main(["loadtest", "compare", "--show", str(out)]) == 0
    assert "Streamer" in capsys.readouterr().out

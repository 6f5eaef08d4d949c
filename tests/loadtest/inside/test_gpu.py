"""bench gpu: every section's code, on tiny shapes; its output, its files, failures it survives."""

from __future__ import annotations

import argparse
import io
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from rich.console import Console

from streamer.errors import ConfigError
from streamer.kernels import ops, reference
from streamer.loadtest.inside.gpu import command as gpu
from streamer.loadtest.inside.gpu import engine as gpu_engine
from streamer.loadtest.inside.gpu import kernels as gpu_kernels
from streamer.loadtest.inside.gpu import linear as gpu_linear
from streamer.loadtest.inside.gpu import models as gpu_models
from streamer.loadtest.inside.gpu import report as gpu_report
from streamer.loadtest.inside.gpu import tune as gpu_tune
from streamer.loadtest.inside.gpu.report import Figure, Report, Results
from tests.kernels.conftest import skip_without_interpreter
from tests.model.late_device import LateDevice
from tests.model.torch_ops import TorchOps

CPU = gpu_models.Where(torch.device("cpu"), is_tiny=True)


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits for a GPU say nothing of a busy CPU."""
    longer = {name: section._replace(budget_s=600.0) for name, section in gpu.SECTIONS.items()}
    monkeypatch.setattr(gpu, "SECTIONS", longer)


def run(*flags: str) -> tuple[int, str]:
    """Exit code and output."""
    parser = argparse.ArgumentParser()
    gpu.add_arguments(parser)
    text = io.StringIO()
    args = parser.parse_args(["--device", "cpu", "--tiny", "--here", *flags])
    return gpu.run(args, Console(file=text, width=200)), text.getvalue()


def new_report(budget_s: float = 60.0, **settings: Any) -> Report:
    return Report("x", budget_s, lambda what: None, Console(file=io.StringIO()), **settings)


@pytest.mark.usefixtures("unhurried")
def test_every_section_runs_and_is_written(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    code, text = run("--out", str(out))
    assert code == 0, text
    found = msgspec.json.decode(out.read_bytes(), type=Results)
    assert found.failures == {}
    assert list(found.seconds) == list(gpu.SECTIONS)
    assert {f.section for f in found.figures} == set(gpu.SECTIONS)
    assert all(f.value > 0 for f in found.figures)
    assert found.is_tiny
    assert "say nothing about speed" in found.note
    assert found.met == {}, "tiny shapes have no targets"
    assert set(found.versions) >= {"python", "torch", "transformers"}
    measured = {(f.what, f.measure) for f in found.figures}
    for name in gpu_models.SHAPES:
        assert {(name, "one stream"), (name, "share")} <= measured
    assert ("Llama-3.1-8B, 4 bits", "share") in measured
    for kind in ("", ", int8 KV", ", fp8 KV"):
        assert (f"Qwen3-0.6B{kind}", "4 requests") in measured
        for shape in gpu_kernels.TINY_SHAPES:
            assert (shape.name, f"paged{kind}") in measured
    assert ("transformers, Qwen3-0.6B", "4 requests") in measured
    for form in ("dense", "4 bits", "8 bits", "FP8", "FP8 in groups of 128"):
        assert {("64 x 64, 1 rows", form), ("64 x 64, 8 rows", form)} <= measured
    mixed = "Qwen3-0.6B, 24 tokens, 2 of them decodes"
    assert {(mixed, "step, recorded"), (mixed, "step, op by op"), (mixed, "op by op")} <= measured
    assert all(word in text for word in ("section", "attention", "say nothing about speed"))


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("section", ["single", "batch", "step"])
def test_sections_with_models_on_the_gpus_runner(
    monkeypatch: pytest.MonkeyPatch, section: str
) -> None:
    """The CUDA runner, one plan ahead, with recorded steps, on a device that delays all work; one
    measures steps that are not."""
    skip_without_interpreter()
    from streamer.kernels.gpu.sampling import sample

    devices: list[LateDevice] = []

    def new_device(where: gpu_models.Where) -> LateDevice:
        devices.append(LateDevice(len(devices)))
        return devices[-1]

    monkeypatch.setattr(gpu_models.Where, "new_device", new_device)
    monkeypatch.setattr(ops, "choose", lambda device: TorchOps())
    monkeypatch.setattr(sample, "best", reference.best)
    with np.errstate(all="ignore"):
        code, text = run("--only", section)
    assert code == 0, text
    assert len(devices) == {"single": 5, "batch": 3, "step": 7}[section]
    idle = [device.num_replays for device in devices].count(0)
    assert idle == (section == "step")


def test_sections_by_name_in_the_benchs_order(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    code, _ = run("--only", "swap, bandwidth", "--out", str(out))
    found = msgspec.json.decode(out.read_bytes(), type=Results)
    assert (code, list(found.seconds)) == (0, ["bandwidth", "swap"])
    with pytest.raises(ConfigError, match="'swaps' is not one of bandwidth, single"):
        run("--only", "swaps")


def test_a_section_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(where: gpu_models.Where, report: Report) -> None:
        report.add("half", "done", 1.0, "x")
        raise ValueError("no such\nkernel")

    monkeypatch.setattr(gpu_engine, "step", broken)
    out = tmp_path / "gpu.json"
    code, text = run("--only", "bandwidth,step,swap", "--out", str(out))
    assert code == 1
    assert "step failed: ValueError: no such" in text
    found = msgspec.json.decode(out.read_bytes(), type=Results)
    assert found.failures == {"step": "ValueError: no such"}
    assert 'raise ValueError("no such\\nkernel")' in found.tracebacks["step"]
    assert "in broken" in text, "the whole traceback is printed"
    assert {f.section for f in found.figures} == {"bandwidth", "step", "swap"}


def test_figures_are_written_after_each_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ends the bench, such as its machine, leaves the sections before it."""

    def killed(where: gpu_models.Where, report: Report) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_kernels, "swap", killed)
    out = tmp_path / "gpu.json"
    with pytest.raises(KeyboardInterrupt):
        run("--only", "bandwidth,swap", "--out", str(out))
    assert list(msgspec.json.decode(out.read_bytes(), type=Results).seconds) == ["bandwidth"]


def test_tuning_sets_a_kernels_constants_while_it_is_timed() -> None:
    paged = pytest.importorskip("streamer.kernels.gpu.attention.paged")
    cuda = gpu_models.Where(torch.device("cuda"), is_tiny=True)
    stages = paged.STAGES
    with gpu_tune._set(gpu_tune.Choice("paged", {"STAGES": 7}), cuda):
        assert paged.STAGES == 7
    assert stages == paged.STAGES
    for choice in (*gpu_tune.DECODES, *gpu_tune.PREFILLS, *gpu_tune.LINEARS):
        with gpu_tune._set(choice, cuda):
            pass


@pytest.mark.parametrize("form", [*gpu_linear.WIDENED, gpu_linear.FP8], ids=lambda form: form.name)
def test_timed_weights_are_of_their_form(
    monkeypatch: pytest.MonkeyPatch, form: gpu_linear.Form
) -> None:
    """On the GPU's kernels: what is widened is tuned, and FP8 with a scale for each output goes to
    torch's product where the device has one."""
    skip_without_interpreter()
    from streamer.kernels.gpu import backend
    from streamer.kernels.gpu.linear import fp8
    from streamer.kernels.gpu.linear.packed import Packed, Widened

    monkeypatch.setattr(ops, "choose", lambda device: backend)
    monkeypatch.setattr(fp8, "has_products", lambda device: True)
    bfloat16 = gpu_models.Where(torch.device("cpu"), is_tiny=True)
    monkeypatch.setattr(gpu_models.Where, "dtype", torch.bfloat16)
    made = gpu_linear.weight_of(form, (32, 256), bfloat16)
    assert isinstance(made, Packed)
    (part,) = made._parts
    if form is gpu_linear.FP8:
        assert isinstance(part, fp8.Fp8)
        return
    assert isinstance(part, Widened)
    codes = part.codes
    assert (codes.bits, codes.group, codes.is_float) == (form.bits, form.group, form.is_float)
    held = codes.words.nbytes + codes.scales.nbytes
    assert held == form.num_bytes((32, 256))


def test_every_tile_that_is_tuned_is_another() -> None:
    """Settings that the heads of the bench's shapes round to the same tile would time it twice."""
    paged = pytest.importorskip("streamer.kernels.gpu.attention.paged")
    cuda = gpu_models.Where(torch.device("cuda"), is_tiny=True)

    def tile(choice: gpu_tune.Choice) -> tuple[int, ...]:
        with gpu_tune._set(choice, cuda):
            shape = paged._Shape(16, 8, 128, torch.bfloat16, torch.bfloat16)
            stages = shape.narrow_stages, shape.stages
            return shape.keys, shape.wide_keys, shape.narrow, shape.wide, *stages

    used = tile(gpu_tune.Choice("paged", {}))
    for choices in (gpu_tune.DECODES, gpu_tune.PREFILLS):
        others = [
            tile(choice)
            for choice in choices
            if not {"MIN_SPLIT", "PROGRAMS"} & choice.values.keys()
            and any(getattr(paged, name) != value for name, value in choice.values.items())
        ]
        assert len({used, *others}) == 1 + len(others) >= 5


def test_a_tile_that_does_not_fit_is_told_and_the_others_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the device itself says ends the section: nothing after it could be trusted."""
    resources: Any = pytest.importorskip("triton.runtime.errors").OutOfResources
    rows, _ = gpu_linear.sizes_of(CPU)
    forms = (*gpu_linear.WIDENED, gpu_linear.FP8)
    first = [None] * len(rows) * (1 + len(forms))  # that are timed as they are
    errors: list[Exception | None] = [
        *first, None, resources(300_000, 232_448, "shared memory"),
    ]  # fmt: skip

    def seconds(*_: Any) -> float:
        if errors and (error := errors.pop(0)) is not None:
            raise error
        return 1e-6

    for module in (gpu_tune, gpu_linear):
        monkeypatch.setattr(module, "seconds_of", seconds)
    report = new_report()
    gpu_tune.tune(CPU, report)
    found = report.part.figures
    shapes = len(rows) * len(gpu_linear.WIDENED)
    tried = len(gpu_tune.DECODES) + len(gpu_tune.PREFILLS) + shapes * len(gpu_tune.LINEARS)
    assert len(found) == len(first) + tried + 2 + shapes
    note = found[len(first) + 1].note
    assert note.startswith("does not fit: OutOfResources: out of resource: shared memory")
    assert [figure.value for figure in found].count(0.0) == 1
    errors += [*first, None, torch.AcceleratorError("CUDA error: an illegal memory access")]
    with pytest.raises(torch.AcceleratorError, match="illegal"):
        gpu_tune.tune(CPU, new_report())


def test_a_section_that_takes_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    section = gpu.SECTIONS["batch"]
    monkeypatch.setitem(gpu.SECTIONS, "batch", section._replace(budget_s=0.0))
    code, text = run("--only", "batch")
    assert code == 1
    assert "batch failed: not done within its 0 s" in text


def test_a_process_for_each_section(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    args = argparse.Namespace(
        only="bandwidth,swap", device="cpu", tiny=True, out=tmp_path / "gpu.json", here=False,
        part=None,
    )  # fmt: skip
    text = io.StringIO()
    assert gpu.run(args, Console(file=text, width=200)) == 0
    found = msgspec.json.decode((tmp_path / "gpu.json").read_bytes(), type=Results)
    assert {f.section for f in found.figures} == {"bandwidth", "swap"}
    shown = capfd.readouterr().out
    assert "bandwidth: memory, rate:" in shown, "as it comes, by the process that found it"
    assert "section" not in shown, "but one table"


@pytest.mark.parametrize(
    ("script", "grace_s", "failure"),
    [
        ("os.abort()", 300.0, "its process ended with -6"),
        ("time.sleep(600)", 3.0, "killed after 3 s"),
        ("sys.exit(3)", 300.0, "its process ended with 3"),
    ],
)
def test_a_process_that_dies_or_hangs_leaves_what_it_found(
    monkeypatch: pytest.MonkeyPatch, script: str, grace_s: float, failure: str
) -> None:
    part = '{"figures": [{"section": "s", "what": "w", "measure": "m", "value": 2, "unit": "x"}]}'

    def command(name: str, where: gpu_models.Where, file: Path) -> list[str]:
        wrote = f"import os, pathlib, sys, time; pathlib.Path({str(file)!r}).write_text({part!r})"
        return [sys.executable, "-c", f"{wrote}; {script}"]

    monkeypatch.setattr(gpu, "_command", command)
    monkeypatch.setattr(gpu, "GRACE_S", grace_s)
    monkeypatch.setitem(gpu.SECTIONS, "swap", gpu.Section(0, ""))
    found = gpu._run_apart("swap", CPU)
    assert found.failure == failure
    assert found.figures == [Figure("s", "w", "m", 2.0, "x")]


HANGING = """
import os, sys, time
from streamer.cli import main
from streamer.loadtest.inside.gpu import command, kernels

def stuck(*_):
    time.sleep(1.0)
    os._exit(7)

kernels.swap, command.GRACE_S = stuck, 0.2
command.SECTIONS["swap"] = command.Section(0.0, "")
main(sys.argv[1:])
"""


def test_a_section_that_hangs_says_where(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its threads were at shortly before it is killed."""
    make = gpu._command

    def command(name: str, where: gpu_models.Where, file: Path) -> list[str]:
        _, _, _, *arguments = make(name, where, file)
        return [sys.executable, "-c", HANGING, *arguments]

    monkeypatch.setattr(gpu, "_command", command)
    found = gpu._run_apart("swap", CPU)
    assert found.failure == "its process ended with 7"
    assert "in stuck" in found.traceback


def test_every_section_has_a_function() -> None:
    for name in gpu.SECTIONS:
        assert gpu._function(name).__doc__


def test_all_sections_together_keep_below_ten_minutes() -> None:
    assert sum(section.budget_s + gpu.GRACE_S for section in gpu.SECTIONS.values()) < 600


def test_without_a_gpu_only_tiny_shapes_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, message in (("auto", "--device cpu --tiny"), ("cuda", "no GPU here")):
        args = argparse.Namespace(
            only=None, device=device, tiny=False, out=None, here=True, part=None
        )
        with pytest.raises(ConfigError, match=message) as error:
            gpu.run(args, Console(file=io.StringIO()))
        assert error.value.param == "device"


@pytest.mark.parametrize(
    ("value", "target", "is_ceiling", "is_met"),
    [
        (0.9, 0.9, False, True),
        (0.89, 0.9, False, False),
        (0.3, 0.3, True, True),
        (0.31, 0.3, True, False),
        (5.0, None, False, None),
    ],
)
def test_targets(value: float, target: float | None, is_ceiling: bool, is_met: bool | None) -> None:
    figure = Figure("a", "b", "c", value, "x", "", target, is_ceiling)
    assert figure.is_met is is_met
    found = gpu_report.results(CPU.device, {"a": gpu_report.Part([figure])}, {}, is_tiny=False)
    assert found.met == ({} if is_met is None else {"a: b, c": is_met})
    text = io.StringIO()
    gpu_report.print_table(Console(file=text, width=200), found)
    row = next(line for line in text.getvalue().splitlines() if " c " in line)
    cells = re.split(r"\s{2,}", row.strip())
    shown = [] if target is None else [f"{'<=' if is_ceiling else '>='} {target:g}"]
    assert cells[4:] == [*shown, *{True: ["yes"], False: ["no"], None: []}[is_met]]


def test_figures_without_targets_where_none_are_stored() -> None:
    report = new_report(has_targets=False)
    report.add("a", "b", 1.0, "x", target=2.0)
    assert report.part.figures[0].is_met is None


def test_what_can_not_be_written_is_left_out_and_why_is_written(tmp_path: Path) -> None:
    """The figures before it, and the error with its place; numbers of any kind can."""
    file = tmp_path / "part.json"
    report = new_report(file=file)
    report.add("a", "b", np.float64(1.0), "x", target=gpu_report.AtMost(2.0))
    try:
        report.add("a", "c", 1.0, object())  # type: ignore[arg-type]
    except TypeError as error:
        report.fail(error)
    part = msgspec.json.decode(file.read_bytes(), type=gpu_report.Part)
    assert part == report.part
    assert [(f.measure, f.target, f.is_met) for f in part.figures] == [("b", 2.0, True)]
    assert part.failure.startswith("TypeError")
    assert "report.add" in part.traceback


class WithTargets(Report):
    """A report with the targets that tiny shapes do not have."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **{**settings, "has_targets": True})


@pytest.mark.usefixtures("unhurried")
def test_every_target_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(gpu_report, "Report", WithTargets)
    out = tmp_path / "gpu.json"
    code, text = run("--only", "single,batch,step,attention,swap", "--out", str(out))
    assert code == 0, text
    found = msgspec.json.decode(out.read_bytes(), type=Results)
    assert {name.partition(":")[0] for name in found.met} == set(found.seconds)
    assert {f.measure for f in found.figures if f.is_ceiling} == {"host"}


def test_the_requests_are_nano_vllms() -> None:
    """Its benchmark prints 133,966 tokens of output; its prompts have 142,827."""
    requests = gpu_engine.nano_vllm_requests(is_tiny=False)
    assert len(requests) == 256
    assert sum(r.num_output for r in requests) == 133_966
    assert sum(len(r.prompt) for r in requests) == 142_827
    assert {len(r.prompt) >= 100 for r in requests} == {True}


@pytest.mark.parametrize(
    ("name", "parameters", "read"),
    [
        ("Qwen3-0.6B", 596_049_920, 596_049_920),
        ("Llama-3.2-1B", 1_235_814_400, 1_235_814_400),
        ("Llama-3.1-8B", 8_030_261_248, 8_030_261_248 - 128_256 * 4096),
    ],
)
def test_shapes_have_as_many_parameters_as_the_models(
    name: str, parameters: int, read: int
) -> None:
    """As their model cards and safetensors indices say."""
    from streamer.model.families import expected_tensors, parse_config

    config = parse_config(gpu_models.SHAPES[name])
    assert sum(torch.Size(s).numel() for _, s in expected_tensors(config)) == parameters
    assert gpu_models.read_elements(config) == read


def test_random_weights_are_the_same_in_every_run() -> None:
    first, second = (gpu_models.make_model("Llama-3.1-8B", CPU) for _ in range(2))
    tokens = torch.tensor([5, 6, 7])
    batch = ops.AttentionBatch(
        query_lens=[3],
        context_lens=[3],
        block_tables=torch.zeros(1, 1, dtype=torch.int64),
        slots=torch.arange(3),
        block_size=16,
    )
    logits = [
        model.decoder.forward(
            tokens, tokens, batch, ops.for_cpu().new_pool(1, 2, 16, 2, 16, torch.float32), None
        ).clone()
        for model in (first, second)
    ]
    assert torch.equal(*logits)
    assert logits[0].std() > 0.01
    assert first.step_bytes == 4 * (512 * 64 + 64 + 2 * (64 * 64 * 3 + 128 * 64 * 3 + 128))

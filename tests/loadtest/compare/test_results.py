"""Medians, ratios, goals, tables and the chart of made-up results."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from streamer.loadtest import table
from streamer.loadtest.compare.engines import WEIGHTS
from streamer.loadtest.compare.limit import Machine
from streamer.loadtest.compare.results import (
    Failure,
    Peak,
    Results,
    Sample,
    Start,
    Verdict,
    median_machine,
    model_rows,
    panel,
    percentile,
    report,
    svg,
    verdicts,
)
from streamer.loadtest.compare.workload import MODELS

MIB = 1 << 20
RATES = {  # rates of "small": eq, mix, one, stream; three rounds around these
    "streamer": (4000, 2500, 500, 2600),
    "openvino": (3000, 2400, 460, None),
    "vllm": (2300, 1900, 300, 1800),
    "transformers": (1000, 400, 150, None),
}


def results() -> Results:
    found = Results(
        "2026-11-21 10:00",
        {"cpu": "A <CPU>", "cores": "2 cores"},
        {"streamer": "1.0"},
        {"rounds": 3, "threads": 2},
        machine=[Machine(rate, {8: 660.0, 32: 660.0, 1024: 1000.0}) for rate in (40.0, 44.0, 80.0)],
    )
    for round, factor in enumerate((1.0, 0.9, 1.2)):
        for engine, rates in RATES.items():
            for work, rate in zip(("eq", "mix", "one", "stream"), rates, strict=True):
                if rate is None or (engine == "transformers" and round):
                    continue
                sample = Sample(engine, "small", work, round, rate * factor)
                if work == "stream":
                    first = 150.0 if engine == "vllm" else 140.0
                    sample = Sample(
                        engine, "small", work, round, rate * factor, first, 2 * first, 7.0, 11.0
                    )
                found.samples.append(sample)
    found.peaks += [
        Peak("streamer", "small", 0, False, 700 * MIB),
        Peak("streamer", "small", 0, True, 9000 * MIB),  # not comparable: the server's
        Peak("openvino", "small", 0, False, 500 * MIB),
        Peak("transformers", "small", 0, False, 100 * MIB),  # transformers has no pool
    ]
    return found


def test_a_median_is_over_rounds() -> None:
    assert results().median("streamer", "small", "eq") == 4000
    assert results().median("openvino", "small", "stream") is None
    assert median_machine(results().machine).read_gb_s == 44.0


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 0.5, None), ([3.0], 0.99, 3.0), ([1, 2, 3, 4], 0.5, 2), (list(range(100)), 0.99, 98)],
)
def test_percentiles(values: list[float], share: float, expected: float | None) -> None:
    assert percentile(values, share) == expected


def test_the_best_peer_is_not_ours() -> None:
    assert results().best_peer("small", "eq") == ("openvino", 3000)
    assert results().best_peer("small", "stream") == ("vllm", 1800)
    assert results().leanest_peer("small") == ("openvino", 500 * MIB)
    assert Results("", {}, {}, {}).best_peer("small", "eq") is None


def test_goals() -> None:
    found = {verdict.what: verdict for verdict in verdicts(results())}
    assert {what: verdict.is_met for what, verdict in found.items()} == {
        "eq": True,
        "mix": False,
        "one": True,
        "one, of the limit": False,
        "stream": True,
        "first token, ms": True,
        "peak, MiB": True,
    }
    assert found["eq"].target == pytest.approx(3900)
    assert found["eq"].ratio == pytest.approx(4 / 3)
    assert found["one"].target == 460
    assert found["peak, MiB"].target == 750


def test_the_machines_limit_can_be_the_lower_goal() -> None:
    found = results()
    found.machine = [Machine(20.0, {1024: 500.0})]
    verdict = next(v for v in verdicts(found) if v.what == "eq")
    limit = found.limit("small", "eq")
    assert limit is not None
    assert limit * 0.85 < 3900
    assert verdict.target == pytest.approx(0.85 * limit)


def test_less_can_be_better() -> None:
    assert Verdict("m", "w", 1.0, 2.0, "vllm", 0.5, is_less_better=True).is_met
    assert not Verdict("m", "w", 1.0, 2.0, "vllm", 0.5).is_met


def test_results_survive_the_disk(tmp_path: Path) -> None:
    file = tmp_path / "new" / "r.json"
    results().write(file)
    assert Results.read(file) == results()
    assert [path.name for path in file.parent.iterdir()] == ["r.json"]


def test_the_table() -> None:
    rows = model_rows(results(), "small")
    assert {len(row) for row in rows} == {len(rows[0])}
    text = table.markdown(rows)
    assert "| OpenVINO | 3,000 | 2,400 | 460 | - | - | - | 500 |" in text
    assert "| transformers, static | 1,000* | 400* | 150* | - | - | - | 100 (no pool) |" in text
    assert "| ours / best peer | 1.33 | 1.04 | 1.09 | 1.44 |" in text
    ours = next(row for row in rows if row[0] == "Streamer")
    assert ours[5:] == ["140 / 280", "7 / 11", "700"]


def test_the_report_says_what_failed_and_what_is_met() -> None:
    found = results()
    found.failures.append(Failure("vllm", "half", 0, "it ended: out of memory"))
    text = report(found)
    assert "vllm, half, round 1: it ended: out of memory" in text
    assert "not met" in text
    assert "44.0 GB/s" in text
    assert report(Results("", {}, {}, {"threads": 2, "rounds": 1}))


def test_the_chart_is_an_svg_with_a_bar_for_every_median() -> None:
    found = results()
    root = ElementTree.fromstring(svg(found))
    name = "{http://www.w3.org/2000/svg}"
    bars = [bar.get("class") for bar in root.iter(f"{name}rect")]
    assert bars.count("bar s0") == 4
    assert len(bars) == sum(rate is not None for rates in RATES.values() for rate in rates)
    assert len(list(root.iter(f"{name}line"))) == 4  # the limits
    texts = [text.text or "" for text in root.iter(f"{name}text")]
    assert any("A <CPU>" in text for text in texts)


def test_a_longer_bar_is_a_higher_rate() -> None:
    name = "{http://www.w3.org/2000/svg}"
    parts = panel(results(), "small", "eq")
    root = ElementTree.fromstring(f'<svg xmlns="{name[1:-1]}">{"".join(parts)}</svg>')
    widths = [float(bar.get("width") or 0) for bar in root.iter(f"{name}rect")]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] / widths[1] == pytest.approx(4 / 3, rel=0.01)


def test_a_panel_of_several_kinds_of_weights() -> None:
    """Without the limit of one of them; a long name has the room that it takes."""
    found = results()
    found.samples.append(Sample("streamer-int4-g128-kv8", "small", "eq", 0, 9000.0))
    parts = "".join(panel(found, "small", "eq"))
    root = ElementTree.fromstring(f"<svg>{parts}</svg>")
    assert not list(root.iter("line"))
    lefts = [float(bar.get("x") or 0) for bar in root.iter("rect")]
    assert lefts == pytest.approx([27 * 7.2 + 6] * 5, abs=0.1)
    assert "Streamer int4 g128, int8 KV" in parts


def test_weights_of_a_kind_are_compared_with_each_other() -> None:
    """Each kind has its table and goals: of the peers, one stream's limit, our own bfloat16."""
    found = results()
    for engine, rates in {
        "streamer-int4": (7000, 900),
        "streamer-q4_0": (5000, 800),
        "openvino-int4": (4000, 700),
        "openvino-int8": (9000, 9000),
    }.items():
        for work, rate in zip(("eq", "one"), rates, strict=True):
            found.samples.append(Sample(engine, "small", work, 0, float(rate)))
    assert found.best_peer("small", "eq", kind=4) == ("openvino-int4", 4000)
    assert [engine.name for engine in found.of_kind("small", 8)] == ["openvino-int8"]
    goals = {verdict.what: verdict for verdict in verdicts(found)}
    assert goals["eq"].peer == "openvino"
    assert goals["Streamer int4, eq, against bfloat16"].is_met  # 7000 of 6000
    assert not goals["Streamer Q4_0, eq, against bfloat16"].is_met
    limit = found.limit("small", "one", "streamer-int4")
    dense = found.limit("small", "one")
    assert limit is not None
    assert dense is not None
    assert 2.5 < limit / dense < 16 / 4.5  # the cache is read as before
    assert goals["Streamer int4, one, of the limit"].target == pytest.approx(0.85 * limit)
    for engine, rate in (("streamer", 1000.0), ("streamer-int4", 1290.0), ("openvino-int4", 9e9)):
        found.samples.append(Sample(engine, "small", "prompt", 0, rate))
    prompts = [verdict for verdict in verdicts(found) if "prompt" in verdict.what]
    assert [(v.what, v.is_met) for v in prompts] == [
        ("Streamer int4, prompt, against bfloat16", False)  # 1.29 of 1.3, whatever a peer has
    ]
    text = report(found)
    assert "small, 4 bits, tokens/s" in text
    assert "Streamer Q4_0 / best peer" in text


def test_serving_begins_within_three_seconds() -> None:
    """With `half` in 4 bits; the median of rounds, beside the server's peak of memory."""
    found = Results("", {}, {}, {"threads": 2, "rounds": 3})
    for engine, seconds in (("streamer-q4_0", (2.0, 2.5, 9.0)), ("streamer", (4.0,) * 3)):
        for round, value in enumerate(seconds):
            found.samples.append(Sample(engine, "half", "eq", round, 100.0))
            found.starts.append(Start(engine, "half", round, value))
            found.peaks.append(Peak(engine, "half", round, True, 900 * MIB))
    (verdict,) = (v for v in verdicts(found) if "start" in v.what)
    assert (verdict.ours, verdict.target, verdict.is_met) == (2.5, 3.0, True)
    assert "| Streamer Q4_0 | 100 | 900 | 2.5 |" in table.markdown(model_rows(found, "half", 4))


def test_a_single_stream_is_measured_against_memory_beside_it() -> None:
    """Whose rate another minute's measurement of the machine does not give."""
    found = results()
    everywhere = {work: found.limit("small", work) for work in ("one", "eq")}
    replace = msgspec.structs.replace
    found.samples = [
        replace(s, read_gb_s=22.0) if (s.engine, s.work) == ("streamer", "one") else s
        for s in found.samples
    ]
    one, before = found.limit("small", "one"), everywhere["one"]
    assert one is not None
    assert before is not None
    assert one == pytest.approx(before / 2, rel=0.02)
    assert found.limit("small", "eq") == everywhere["eq"]
    assert "Memory's mean rate between requests of one, GB/s: Streamer 22.0." in report(found)


def test_bits_are_those_of_all_that_a_step_reads() -> None:
    """`half` in int4: 378 M in 4.63 bits and a head of 33 M in 8."""
    assert WEIGHTS["int4"].mean_bits(MODELS["half"]) == pytest.approx(4.90, abs=0.01)
    assert WEIGHTS["Q8_0"].mean_bits(MODELS["half"]) == 8.5

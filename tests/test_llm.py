"""LLM: prompts in, answers out, without an event loop."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from streamer import LLM, SamplingParams
from streamer.errors import ConfigError, EngineDead, InvalidRequest, Overloaded, StreamerError
from streamer.fake.model import expected_text, expected_tokens
from tests.engine.helpers import DEADLINE_S


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("fake", max_num_seqs=8, max_queue=4, num_gpu_blocks_override=512) as llm:
        yield llm


def test_a_misspelt_setting_is_refused_with_the_near_name() -> None:
    with pytest.raises(ConfigError, match="did you mean gpu_memory_utilization") as refusal:
        LLM("fake", gpu_memory_utilisation=0.3)
    assert refusal.value.param == "gpu_memory_utilisation"


def test_answers_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [f"count to {1 + i % 9}" for i in range(60)]  # far more than rows and queue
    outputs = llm.generate(prompts, progress=False)
    assert [o.prompt for o in outputs] == prompts
    assert [o.text for o in outputs] == [expected_text(1 + i % 9) for i in range(60)]
    assert {o.finish_reason for o in outputs} == {"stop"}


def test_an_output_has_text_ids_reason_and_usage(llm: LLM) -> None:
    params = SamplingParams(max_tokens=5, n=2, logprobs=1, seed=7)
    (output,) = llm.generate([(5, 6, 7)], params)
    assert output.prompt is None
    assert output.prompt_token_ids == (5, 6, 7)
    assert output.seed == 7
    assert len(output.choices) == 2
    for choice in output.choices:
        assert choice.text == expected_text(5)
        assert choice.token_ids == tuple(expected_tokens(0, 5))
        assert choice.finish_reason == "length"
        assert choice.logprobs is not None
        assert len(choice.logprobs) == 5
    assert (output.usage.prompt_tokens, output.usage.completion_tokens) == (3, 10)
    assert (output.text, output.token_ids) == (expected_text(5), tuple(expected_tokens(0, 5)))


def test_a_prompt_is_scored_if_requested(llm: LLM) -> None:
    prompt = tuple(range(40, 40 + 300))
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    scored, other = llm.generate([prompt, prompt], [params, SamplingParams(max_tokens=1)])
    assert other.prompt_logprobs is None
    assert scored.prompt_logprobs is not None
    first, *rest = scored.prompt_logprobs
    assert first is None
    assert tuple(lp.token_id for lp in rest if lp is not None) == prompt[1:]
    assert {len(lp.top) for lp in rest if lp is not None} == {2}


@pytest.mark.parametrize("prompt", ["count to 4", tuple(b"count to 4"), list(b"count to 4")])
def test_one_prompt_is_a_list_of_one(llm: LLM, prompt: str | list[int]) -> None:
    assert [o.text for o in llm.generate(prompt)] == [expected_text(4)]


def test_conversations(llm: LLM) -> None:
    chat = [{"role": "user", "content": "count to 3"}]
    assert [o.text for o in llm.chat(chat)] == [expected_text(3)]
    assert [o.text for o in llm.chat([chat, chat])] == [expected_text(3)] * 2


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("hi", "a conversation is a list such as"),
        ([["hi"]], r"messages\[0\] must be an object"),
        ([{"role": "user"}], r"messages\[0\].content is required"),
        ([[{"role": "user", "content": "a"}, {"content": "b"}]], r"messages\[1\].role is required"),
    ],
)
def test_what_is_no_conversation_is_refused(llm: LLM, wrong: Any, says: str) -> None:
    """It was an AttributeError of the engine's own, or answered."""
    with pytest.raises(InvalidRequest, match=says):
        llm.chat(wrong)


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 9, 1)]
    outputs = llm.generate(["a", "b", "c"], params)
    assert [len(o.token_ids) for o in outputs] == [3, 9, 1]
    with pytest.raises(InvalidRequest, match="3 params for 2 prompts"):
        llm.generate(["a", "b"], params)
    wrong = {"max_tokens": 5}  # was an AttributeError of the engine's own
    for params in (wrong, [wrong, wrong]):
        with pytest.raises(InvalidRequest, match="params must be a SamplingParams"):
            llm.generate(["a", "b"], params)  # type: ignore[arg-type]


def test_no_prompts_no_outputs(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.chat([]) == []


def test_the_first_error_is_raised_and_the_rest_is_given_up(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="no tokens"):
        llm.generate(["count to 9", (), "count to 9"], SamplingParams(max_tokens=5))
    with pytest.raises(InvalidRequest, match="a prompt must be"):
        llm.generate([1.5])  # type: ignore[list-item]
    assert llm.generate("count to 2")[0].text == expected_text(2)


def test_a_bar_for_more_than_a_few_and_on_a_terminal_alone(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.generate(["count to 2"] * 9)
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes what follows for a terminal
    llm.generate(["count to 2"] * 3)
    assert capsys.readouterr().out == ""
    llm.generate(["count to 2"] * 9)
    assert "9/9" in capsys.readouterr().out
    llm.generate(["count to 2"] * 9, progress=False)
    assert capsys.readouterr().out == ""


def test_more_choices_than_the_queue_takes_wait_their_turn() -> None:
    with LLM("fake", max_num_seqs=8, max_queue=4) as llm:
        outputs = llm.generate(["count"] * 6, SamplingParams(n=4, max_tokens=5), progress=False)
    assert [len(output.choices) for output in outputs] == [4] * 6


def test_concurrent_threads_share_the_queue() -> None:
    """The queue's bound holds for all calls together: no thread gets an overload error."""
    with LLM("fake", max_num_seqs=2, max_queue=1) as llm, ThreadPoolExecutor(8) as threads:
        params = SamplingParams(n=2, max_tokens=5)
        calls = [threads.submit(llm.generate, ["count"] * 4, params) for _ in range(8)]
        outputs = [output for call in calls for output in call.result(DEADLINE_S)]
    assert [len(output.choices) for output in outputs] == [2] * 32


FORK = """
import asyncio, os, sys
from streamer import LLM, SamplingParams
from streamer.errors import EngineDead
from tests.engine.helpers import make_engine, request

def in_child(work):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 1
    try:
        work()
    except EngineDead as e:
        code = 7 if e.code == "engine_forked" else 2
    finally:
        os._exit(code)

async def of_engine(engine):
    await engine.start()
    codes = [in_child(lambda: engine.submit(request())), in_child(lambda: engine.tokenizer)]
    codes.append(in_child(lambda: engine.in_pool(int).send(None)))
    codes.append(in_child(lambda: engine.start().send(None)))
    await engine.submit(request()).wait()
    await engine.aclose()
    return codes

with LLM("fake") as llm:
    llm.generate("count to 2")
    print(in_child(lambda: llm.generate("count to 3")), in_child(lambda: (llm.close(), 1 / 0)))
    print(llm.generate("count to 3")[0].text)
print(asyncio.run(of_engine(make_engine())))
"""


def test_a_forked_child_gets_an_error_at_once_and_its_parent_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK],
        cwd=Path(__file__).parents[1],
        timeout=DEADLINE_S,
        capture_output=True,
        text=True,
    )
    counted, text, codes = done.stdout.splitlines()
    assert (counted, text, codes) == ("7 1", expected_text(3), "[7, 7, 7, 7]"), done.stderr


async def test_it_works_beside_a_running_loop(llm: LLM) -> None:
    """As in a notebook."""
    assert llm.generate("count to 2")[0].text == expected_text(2)
    assert asyncio.get_running_loop().is_running()


def test_closing_ends_its_threads_and_refuses_what_follows() -> None:
    llm = LLM("fake")
    llm.close()
    llm.close()
    with pytest.raises(EngineDead, match="closed"):
        llm.generate("hello")
    with pytest.raises(EngineDead, match="closed"):
        llm.generate(["hello"] * 9)


def test_closing_ends_the_calls_of_other_threads() -> None:
    """Whether a call runs, waits or has just begun; one thread may close it, or two."""
    for _ in range(5):
        llm = LLM("fake", max_num_seqs=2, max_queue=1)
        ends: Queue[StreamerError] = Queue()

        def ask(llm: LLM = llm, ends: Queue[StreamerError] = ends) -> None:
            try:
                while True:
                    llm.generate(["One", "Two", "Three"], SamplingParams(max_tokens=40))
            except StreamerError as e:
                ends.put(e)

        threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
        closing = [threading.Thread(target=llm.close, daemon=True) for _ in range(2)]
        for thread in threads:
            thread.start()
        llm.generate("Four", SamplingParams(max_tokens=4))
        for thread in closing:
            thread.start()
        for _ in threads:
            assert isinstance(ends.get(timeout=DEADLINE_S), EngineDead | Overloaded)
        for thread in closing:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def test_a_missing_model_raises_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError, match="no folder"):
        LLM("./not-here")
    assert set(threading.enumerate()) <= before  # an earlier test's may end meanwhile


def test_a_journal_which_it_would_not_write_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="journal: is for") as refused:
        LLM("fake", journal=str(tmp_path))
    assert refused.value.param == "journal"

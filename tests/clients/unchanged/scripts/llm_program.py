"""llm: the program itself, with a tool that is Python, and a schema."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

FUNCTION = """
def get_weather(city: str) -> str:
    "The weather of a city."
    return f"18 degrees in {city}"
"""


def llm(configuration: str, *words: str) -> str:
    """What the program prints."""
    folder = Path(configuration).stem
    Path(folder).mkdir(exist_ok=True)
    shutil.copy(configuration, Path(folder) / "extra-openai-models.yaml")
    command = [Path(sys.executable).with_name("llm"), *words]
    variables = {**os.environ, "LLM_USER_PATH": str(Path(folder).resolve())}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    print("$ llm", *words[:3], done.stdout, done.stderr, sep="\n")
    assert done.returncode == 0
    return done.stdout


for words in ((), ("--no-stream",)):
    said = llm(
        "models.yaml", "-m", "streamer", "--functions", FUNCTION, "How is the weather?", *words
    )
    assert "It is 18 degrees in Bern." in said
is_sure = {"type": "object", "properties": {"is_sure": {"type": "boolean"}}}
schema = json.dumps({**is_sure, "required": ["is_sure"], "additionalProperties": False})
reply = llm("bundled.yaml", "-m", "streamer", "--schema", schema, "Which color?")
assert json.loads(reply).keys() == {"is_sure"}
print("a tool, whole and streamed, and a schema")

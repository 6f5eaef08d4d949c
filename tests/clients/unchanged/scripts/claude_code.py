"""Claude Code: two sessions that read a file and change it by its tools; what the cache saved."""

import json
import subprocess
from pathlib import Path

work = Path("work")
work.mkdir()
notes = work / "notes.txt"
words = (
    "claude -p 'Change the notes.' --allowedTools Read,Edit --output-format stream-json --verbose"
)
line = f"source ../configuration.sh && exec {words}"
for session in range(2):
    notes.write_text("There are old apples here.\n")
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=work,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout
    assert notes.read_text() == "There are new pears here.\n", done.stdout
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    answers = [event["message"] for event in events if event["type"] == "assistant"]
    usages = {answer["id"]: answer["usage"] for answer in answers}
    assert len(usages) == 3
    for number, usage in enumerate(usages.values()):
        cached = usage["cache_read_input_tokens"]
        share = cached / (cached + usage["input_tokens"])
        print(f"session {session} request {number}: {share:.1%} of the prompt from the cache")
        assert share >= (0.95 if number else 0.6 * session)
print("two sessions that read a file and changed it,", f"{share:.1%} from the cache at the end")

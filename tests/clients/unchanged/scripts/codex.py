"""Codex CLI: a session that reads a file by its shell, and changes it by its patches."""

import os
import shutil
import subprocess
from pathlib import Path

work, home = Path("work"), Path(os.environ["HOME"]) / ".codex"
work.mkdir()
home.mkdir()
shutil.copy("config.toml", home)
notes = work / "notes.txt"
notes.write_text("There are old apples here.\n")
words = ["codex", "exec", "--skip-git-repo-check", "--sandbox", "workspace-write"]
done = subprocess.run(
    [*words, "Change the notes."],
    cwd=work,
    env={**os.environ, "STREAMER_API_KEY": "none"},
    stdin=subprocess.DEVNULL,
    timeout=200,
)
assert done.returncode == 0
assert notes.read_text() == "There are new pears here.\n"
print("a session that read a file and patched it")

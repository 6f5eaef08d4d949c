"""opencode: a session that reads a file and changes it by its tools."""

import shutil
import subprocess
from pathlib import Path

work = Path("work")
work.mkdir()
shutil.copy("opencode.json", work)
notes = work / "notes.txt"
notes.write_text("There are old apples here.\n")
done = subprocess.run(
    ["opencode", "run", "Change the notes."], cwd=work, stdin=subprocess.DEVNULL, timeout=200
)
assert done.returncode == 0
assert notes.read_text() == "There are new pears here.\n"
print("a session that read a file and changed it")

"""The tests of this folder are found: on a machine without a GPU nothing else imports them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
SCRIPT = """
import sys, pytest, torch
torch.cuda.is_available = lambda: True
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_every_file_is_collected_where_there_is_cuda() -> None:
    """Without pytest-asyncio too, whose settings pytest then does not know."""
    arguments = ["-q", "--collect-only", "-p", "no:asyncio", "-p", "no:cacheprovider", str(FOLDER)]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = dict(re.findall(r"tests/gpu/(\w+)\.py: (\d+)", done.stdout))
    assert set(found) == {file.stem for file in FOLDER.glob("test_*.py")}
    assert int(found["test_ops"]) > 200

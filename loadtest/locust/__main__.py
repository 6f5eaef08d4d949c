"""`python -m streamer.loadtest.locust`: Locust with the locustfile beside this.

All of Locust's flags apply, and those of options.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

try:
    import locust.main  # first: it patches sockets and threads
except ModuleNotFoundError as error:
    if error.name != "locust":
        raise
    sys.exit("Locust is not installed: pip install 'streamer[loadtest]'")

if __name__ == "__main__":
    sys.argv[1:1] = ["-f", str(Path(__file__).resolve().with_name("locustfile.py"))]
    sys.argv[0] = "locust"
    locust.main.main()

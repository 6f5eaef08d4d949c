"""`python -m streamer`: the command line, for machines where scripts are not on the path."""

from __future__ import annotations

import sys

from streamer.cli import main

if __name__ == "__main__":
    sys.exit(main())

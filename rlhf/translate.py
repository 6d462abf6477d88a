"""python -m rlhf.translate FILE: turns a configuration of verl, TRL or OpenRLHF into a recipe."""

import sys

from rlhf.cli.translate import main

if __name__ == "__main__":
    sys.exit(main())

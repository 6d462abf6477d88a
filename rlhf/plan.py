"""python -m rlhf.plan OVERRIDES: memory of a run, phase by phase, before anything loads."""

import sys

from rlhf.cli.plan import main

if __name__ == "__main__":
    sys.exit(main())

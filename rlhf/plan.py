"""python -m rlhf.plan OVERRIDES: shows the memory, disk and tokens that a run would need."""

import sys

from rlhf.cli.plan import main

if __name__ == "__main__":
    sys.exit(main())

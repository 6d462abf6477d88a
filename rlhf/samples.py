"""python -m rlhf.samples RUN: what the policy said."""

import sys

from rlhf.cli.samples import main

if __name__ == "__main__":
    sys.exit(main())

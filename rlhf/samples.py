"""python -m rlhf.samples RUN: shows the samples of a run."""

import sys

from rlhf.cli.samples import main

if __name__ == "__main__":
    sys.exit(main())

"""python -m rlhf.report RUN ...: writes a page about runs."""

import sys

from rlhf.cli.report import main

if __name__ == "__main__":
    sys.exit(main())

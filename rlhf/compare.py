"""python -m rlhf.compare RUN ...: shows the results of runs side by side."""

import sys

from rlhf.cli.compare import main

if __name__ == "__main__":
    sys.exit(main())

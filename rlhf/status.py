"""python -m rlhf.status RUN ...: shows what runs do now."""

import sys

from rlhf.cli.status import main

if __name__ == "__main__":
    sys.exit(main())

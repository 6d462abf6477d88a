"""Set before torch is imported, here and in every process that a test starts."""

import os

# Tests are many small processes: threads of one that wait for a core make all of them crawl.
os.environ.setdefault("OMP_NUM_THREADS", "1")

"""Last import of the server of ranks: keeps all that it has imported out of the garbage collector, as launchers do.

Otherwise each collection in a rank goes through half a gigabyte that never changes, and copies every page of it.
"""

import gc

gc.collect()
gc.freeze()

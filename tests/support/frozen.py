"""Excludes the imports of the server of ranks from garbage collection, like launchers; must be its last import.

Otherwise each collection in a rank visits half a gigabyte of constant objects and copies every page.
"""

import gc

gc.collect()
gc.freeze()

"""Training engines behind one interface (`base.py`). The checkpoint subsystem is handed their state, never the engine itself."""

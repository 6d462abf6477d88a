"""Saves a run's checkpoints so that no kill can tear them, finds them again, and restores them bit for bit.

`checkpointer` ties the layers to a run. `state` defines what a checkpoint saves beside tensors. `commit` publishes,
verifies and removes directories. `load` finds and restores the newest intact checkpoint. `remote` copies checkpoints
elsewhere. `export` turns whole checkpoints into Hugging Face folders. `save` writes a snapshot. `start` prepares run
directories before the ranks train. A layer imports the layers below it: state < commit < load, remote, export < save <
start. Nothing here knows a backend: callers pass state (`rlhf.storage.state`). `rlhf.storage` reads and writes bytes.
"""

"""Checkpoints of a run: saved so that no kill can tear them, found again, and restored to the last bit.

`checkpointer` ties the rooms to a run. `save` writes a snapshot, `commit` publishes and removes directories and proves
them whole, `load` finds and restores the newest intact one, `start` prepares run directories before the ranks train,
`remote` copies checkpoints elsewhere. Nothing here knows a backend: it is handed state (`rlhf.storage.state`). Bytes
are `rlhf.storage`'s.
"""

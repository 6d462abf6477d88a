"""Checkpoints of a run: saved so that no kill can tear them, found again, and restored to the last bit.

`checkpointer` ties the layers to a run. `state` is what a checkpoint saves beside tensors, `commit` publishes, verifies
and removes directories, `load` finds and restores the newest intact one, `remote` copies checkpoints elsewhere,
`export` turns whole ones into Hugging Face folders, `save` writes a snapshot, `start` prepares run directories before
the ranks train. A layer imports those below it: state < commit < load, remote, export < save < start. Nothing here
knows a backend: it is handed state (`rlhf.storage.state`). Bytes are `rlhf.storage`'s.
"""

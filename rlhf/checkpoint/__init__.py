"""Saves a run's checkpoints so that no kill can tear them, finds them again, and restores them bit for bit.

`checkpointer` ties the layers to a run. `state` defines the saved state beside tensors. `commit` publishes, verifies
and removes directories. `load` finds and restores the newest intact checkpoint. `remote` copies checkpoints to other
storage. `export` converts whole checkpoints to Hugging Face folders. `save` writes a snapshot. `start` prepares run
directories before the ranks train. `memory` publishes snapshots in the nodes' memory. `verbs` are the commands of
`python -m rlhf.checkpoint`. A layer imports only lower layers: state < commit < load, remote, export < save < start <
memory < verbs. No layer imports a backend: callers pass state (`rlhf.storage.state`). `rlhf.storage` reads and writes
bytes.
Comments cite the promises of docs/design/checkpoint-protocol.md by number.
"""

"""The heart: what is saved, how it is committed so that no kill can tear it, and how a run finds its way back.

`layout` names things, `files` writes and hashes bytes, `tensors` is the logical format (named tensors as flat shards), `manifest` is the
proof of wholeness, `commit` publishes and removes, `checkpointer` ties them to the run. Nothing here knows a backend: it is handed state.
"""

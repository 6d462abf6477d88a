"""Stores bytes on disk: file operations, hashes, verified reads, tensor shards, names, errors. Imports rlhf.events."""

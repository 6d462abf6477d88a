"""Stores bytes on disk: file operations, hashes, verified reads, tensor shards, names, errors. Depends on events."""

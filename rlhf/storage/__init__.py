"""Bytes on disk: file operations, hashes, checked reading, tensors as shards, names, errors. Depends on events only."""

"""Parts of `python -m benchmarks.gpu`, each a function from a `Place` to its figures."""

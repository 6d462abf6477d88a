"""Writes Kubernetes manifests of runs, and runs the ranks of a pod."""

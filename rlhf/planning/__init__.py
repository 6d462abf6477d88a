"""Memory and disk that a run takes, computed from settings and shapes before anything loads."""

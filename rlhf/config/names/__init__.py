"""Names of settings: what users of other trainers type, and what a wrong name or value most likely means."""

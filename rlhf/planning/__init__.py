"""Plans memory and disk from settings and shapes, before anything loads."""

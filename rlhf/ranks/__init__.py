"""Code that every rank uses: process groups, coordination, locks and status files; and the launcher of the ranks."""

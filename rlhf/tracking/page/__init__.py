"""Writes the report of runs as one HTML page, and serves it on this machine."""

from rlhf.tracking.page.page import page_of, write_page

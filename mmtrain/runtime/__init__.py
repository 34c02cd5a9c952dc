"""Processes: starting ranks, watching, stopping and agreeing; GPUs of this machine."""

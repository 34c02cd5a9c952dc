"""Measured seconds and bytes of layers and transfers on this machine, for plans."""

"""Modules that train beside frozen ones: the projector and adapters."""

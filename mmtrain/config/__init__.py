"""Every key of a configuration: its type, bounds, default, and what a resumed run may change."""

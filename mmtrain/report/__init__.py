"""A run's records as one page."""

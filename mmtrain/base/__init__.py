"""Errors, files, printing and other small means that every wing may use."""

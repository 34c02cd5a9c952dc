"""Slices of the LLM: loading, packed attention, recurrent mixers, the head and its loss."""

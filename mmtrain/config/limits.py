"""Limits on what a run reads that more than one wing asks for; they hold before anything is read or decoded."""

# A decoded pixel takes 3 or 4 bytes: a few files of some kilobytes that declare billions of pixels would otherwise take
# a node's memory.
MAX_IMAGE_PIXELS = 100_000_000
MAX_TOKENIZER_BYTES = 200_000_000  # of a tokenizer's file; the largest, of 262,000 tokens, has 34 MB
MAX_LAYERS = 1000  # of a model; the deepest published LLMs have 126 decoder layers

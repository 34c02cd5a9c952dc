"""Limits on what a run reads that more than one wing asks for; they hold before anything is read or
decoded.
"""

# A decoded pixel takes 3 or 4 bytes: a few files of some kilobytes that declare billions of pixels
# would otherwise take a node's memory.
MAX_IMAGE_PIXELS = 100_000_000
# of a tokenizer's file; the largest, of 262,000 tokens, has 34 MB
MAX_TOKENIZER_BYTES = 200_000_000
MAX_LAYERS = 1000  # of a model; the deepest published LLMs have 126 decoder layers
MAX_TILES = 100  # of a grid that an image is cut into: each image makes a canvas of so many
MAX_CELLS = 100_000  # of an image that keeps its shape; published recipes take up to 16,384
MAX_GRIDS = 400  # that a layout chooses from; the published have 5 and 36
MAX_GRID_SIDE = 100_000  # pixels

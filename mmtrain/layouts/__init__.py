"""Image layouts: tiles and positions of an image, from its size alone; one file a layout."""

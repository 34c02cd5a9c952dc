"""How an image becomes tiles and positions, from its size alone; one file a layout."""

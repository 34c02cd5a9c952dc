"""Tensors in files, their fingerprints, and layers that do not stay on the device."""

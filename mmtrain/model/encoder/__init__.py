"""The vision encoder, whole or in slices."""

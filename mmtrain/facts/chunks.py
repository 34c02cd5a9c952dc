"""Sizes of the pieces in which a rank computes; plans reserve memory for one piece."""

LOGITS_PER_CHUNK = 2**24  # elements; the loss makes logits in chunks of this size
PATCHES_PER_CALL = 11_664  # of a frozen encoder: 16 tiles of 384 pixels, in patches of 14, keep any GPU busy
LEAST_TILES_PER_CALL = 16


def tiles_per_call(patches_per_image: int) -> int:
    """Return the number of tiles that a frozen encoder sees in one call."""
    return max(LEAST_TILES_PER_CALL, PATCHES_PER_CALL // patches_per_image)

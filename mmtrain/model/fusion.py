"""Image embeddings take the image positions of the token sequence.

token embeddings (B, L, D) + places of image positions (P,) + image embeddings (N, T, D) --fuse--> hidden (B, L, D)
"""

from __future__ import annotations

import torch


def fuse(embeddings: torch.Tensor, image_places: torch.Tensor, image_embeddings: torch.Tensor | None) -> torch.Tensor:
    """Put image embeddings (N, T, D), in order, into the positions `image_places` (P,) int64 of rows laid end to end.

    Returns (B, L, D) in the dtype of `embeddings`. Raises ValueError when P is not N * T: a shorter or longer scatter
    would shift every later image's features against its text without an error.
    """
    positions = len(image_places)
    supplied = 0 if image_embeddings is None else image_embeddings.shape[0] * image_embeddings.shape[1]
    if positions != supplied:
        shape = None if image_embeddings is None else tuple(image_embeddings.shape)
        raise ValueError(
            f"{positions} image positions in the batch, but {supplied} image embeddings (shape {shape}): "
            "each image needs as many positions as the encoder gives features"
        )
    if image_embeddings is None:
        return embeddings
    rows = image_embeddings.flatten(0, 1).to(embeddings.dtype)
    return embeddings.flatten(0, 1).index_copy(0, image_places, rows).view_as(embeddings)

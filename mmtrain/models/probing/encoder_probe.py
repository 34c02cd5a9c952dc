"""Before a run with slices: do slices of this encoder compute, to the bit, what the whole one computes?

name, dtype, layer, final norm --child process--> all blocks, no weights: what passes each border, or refused
                               few blocks, made-up weights: whole, in slices--> difference: 0, or refused

An encoder's forward may do anything between its blocks, and most faults of a cut raise no error: they train on wrong
features. So each encoder is tried once, in seconds, and remembered in the user's cache, as LLMs are (probe.py).
"""

from __future__ import annotations

import json
import sys

from mmtrain.base.cache import cache_folder
from mmtrain.base.errors import EncoderSliceError
from mmtrain.config.schema import RunConfig
from mmtrain.models.facts.families import encoder_config
from mmtrain.models.facts.model_files import model_folder
from mmtrain.models.facts.vision_files import is_timm_name
from mmtrain.models.probing.probe import differences_in_child, fingerprint_with_code, remember
from mmtrain.runtime.child import die_with_parent

CUTS = ((0, 0, 1, 2, 3), (0, 2, 3))  # borders of slices: the stem alone, one block each; several blocks
TILES = 2  # not 1, as the stem of later slices has


def probe_encoder(config: RunConfig) -> None:
    """Try `config`'s encoder in slices; nothing without an encoder.

    Raises EncoderSliceError, naming encoder, difference and remedy, where slices differ from the whole encoder by a
    bit, fail, or take longer than `probe.SECONDS`: 5 to 20 s the first time, on a busy machine a minute. Raises
    UserError for an encoder that cannot be loaded, cut or not.
    """
    chosen = config.model.vision
    if chosen is None:
        return
    asked = [config.model.vision_dtype, str(chosen.select_layer), str(chosen.final_norm)]
    of = chosen.name if is_timm_name(chosen.name) else encoder_config(model_folder(chosen.name))  # wherever it lies
    parts = [json.dumps([of, *asked], sort_keys=True).encode()]
    record = cache_folder("probe") / f"encoder-{fingerprint_with_code(parts, ('torch', 'transformers', 'timm'))}.json"
    if record.is_file():
        return
    remedy = "set parallel.encoder_ranks=0, which leaves the encoder whole on rank 0"
    try:
        fault = "cannot be cut into slices"
        (difference,) = differences_in_child(
            __name__, [chosen.name, *asked], chosen.name, fault, failure=EncoderSliceError
        )
    except EncoderSliceError as error:
        raise EncoderSliceError(f"{error}; {remedy}") from None
    if difference != 0:  # a NaN too
        raise EncoderSliceError(
            f"{chosen.name} cannot be cut into slices: features of its slices differ from the whole encoder's by up to "
            f"{difference:.1e}, needed is 0; {remedy}"
        )
    remember(record, {"encoder": chosen.name, "difference": difference})


def _measure(name: str, dtype: str, select_layer: int, final_norm: bool) -> float:
    """In the child: the largest difference of a feature over `CUTS`; infinite where one is not a number.

    Raises EncoderSliceError where blocks are unlike the first, which are tried, or where more passes than a hidden
    state.
    """
    import torch

    from mmtrain.models.modules.stage import DTYPES
    from mmtrain.models.modules.vision import made_up_encoder
    from mmtrain.models.modules.vision_tower import refuse_other_ways, slices_difference

    tried = CUTS[0][-1]
    every = made_up_encoder(name, torch.float32, final_norm=final_norm, select_layer=select_layer)
    refuse_other_ways(every, tried, name)
    tower = made_up_encoder(name, DTYPES[dtype], final_norm=final_norm, depth=tried)
    size = tower.image_size
    images = torch.randn(TILES, 3, size, size, generator=torch.Generator().manual_seed(0))
    return max(slices_difference(tower, cuts, images) for cuts in CUTS)


if __name__ == "__main__":
    die_with_parent()
    print("\ndifferences", _measure(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == str(True)))

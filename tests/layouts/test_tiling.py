"""Tiles and positions of an image of any size: those of the stock processors, and what the stock
models put there.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from typing import Any, get_args

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AyaVisionProcessor,
    LlavaNextConfig,
    LlavaNextModel,
    LlavaNextProcessor,
    LlavaOnevisionConfig,
    LlavaOnevisionModel,
    LlavaOnevisionProcessor,
    LlavaOnevisionVideoProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,
    get_optimal_tiled_canvas,
)
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)

from mmtrain.config.model import LlmSection
from mmtrain.config.schema import DataSection
from mmtrain.facts.quantised import QUANTISATIONS, Quantisation
from mmtrain.layouts.anyres import Anyres, AnyresMax9
from mmtrain.layouts.layout import UnfitImage
from mmtrain.layouts.registry import LAYOUTS, TEXT_ALONE, LayoutName
from mmtrain.layouts.square import Square
from mmtrain.layouts.tiles import Tiles
from mmtrain.model.stage import arranged

# pixels a side, of a tile and of a patch
ENCODERS = ((224, 14), (336, 14), (384, 14), (448, 14), (512, 16))
# With the factor of the connector: what AyaVision's class can be.
SHUFFLED = (
    (224, 14, 2),
    (336, 14, 3),
    (364, 14, 2),
    (384, 14, 3),
    (448, 14, 2),
    (512, 16, 2),
    (512, 16, 4),
)
MAX_TILES = (1, 4, 6, 12)
OWN_GRIDS = {  # (rows, columns) of tiles
    "lines": ((1, 2), (1, 7), (5, 1)),
    "large": ((1, 1), (9, 9), (2, 13)),
    "one": ((3, 2),),
    "twice": ((2, 2), (1, 1), (2, 2), (4, 4), (1, 1)),
}
NEWLINE = -1.0  # no embedding has it

Size = tuple[int, int]  # width, height in pixels


def special_sizes(side: int) -> Iterator[Size]:
    """Extreme shapes, exact grids and what is a pixel beside them, and shapes in the middle of two
    grids.
    """
    for thread in ((20, 2500), (25, 2500), (1, 2500), (1, 60), (1, 1000), (1, 30_000)):
        yield from (thread, thread[::-1])
    yield from ((1, 1), (20, 20))
    for rows, columns in product(range(1, 5), repeat=2):
        width, height = columns * side, rows * side
        yield from [
            (width, height),
            (width - 1, height),
            (width, height + 1),
            (width // 2, height // 2),
        ]
    for count in (4, 6, 12):
        shapes = sorted(
            {
                columns / rows
                for columns in range(1, count + 1)
                for rows in range(1, count // columns + 1)
            }
        )
        for narrow, wide in pairwise(shapes):
            yield from [(round(height * (narrow + wide) / 2), height) for height in (24, 240, 1200)]


def sizes(side: int, count: int) -> list[Size]:
    """The special ones, and so many at random, half of them with sides as likely small as large."""
    draw = random.Random(side)
    chosen = list(special_sizes(side))
    chosen += [(draw.randint(20, 2500), draw.randint(20, 2500)) for _ in range(count // 2)]
    return chosen + [
        (round(20 * 125 ** draw.random()), round(20 * 125 ** draw.random()))
        for _ in range(count // 2)
    ]


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<image>": 0, "<video>": 1, "<|IMG_PATCH|>": 2, "other": 3}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="other"))
    )


def square(side: int) -> dict[str, Any]:
    return {"size": {"height": side, "width": side}}


def next_processor(
    side: int, patch: int, pinpoints: list[list[int]], class_token: bool
) -> LlavaNextProcessor:
    pictures = LlavaNextImageProcessorPil(
        **square(side), crop_size=square(side)["size"], image_grid_pinpoints=pinpoints
    )
    strategy = "default" if class_token else "full"
    return LlavaNextProcessor(
        pictures, tokenizer(), patch, strategy, num_additional_image_tokens=int(class_token)
    )


def onevision_processor(
    side: int, patch: int, pinpoints: list[list[int]]
) -> LlavaOnevisionProcessor:
    pictures = LlavaOnevisionImageProcessorPil(**square(side), image_grid_pinpoints=pinpoints)
    video = LlavaOnevisionVideoProcessor()
    return LlavaOnevisionProcessor(pictures, tokenizer(), video, (side // patch) ** 2, "full")


def packer(
    layout: Anyres, side: int, patch: int
) -> Callable[[torch.Tensor, Size, torch.Tensor], torch.Tensor]:
    """What the stock model makes of the embeddings of one image's tiles: (N, P, D), its size, (D,)
    -> (M, D).
    """
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
    }
    vision |= {"num_attention_heads": 1, "image_size": side, "patch_size": patch}
    text = {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "vocab_size": 8,
    }
    text |= {"num_attention_heads": 1}
    grids = [list(pair) for pair in layout.grids]
    kind, settings = {
        "anyres": (LlavaNextModel, LlavaNextConfig),
        "anyres_max_9": (LlavaOnevisionModel, LlavaOnevisionConfig),
    }[layout.name]
    with torch.device("meta"):
        model = kind(settings(vision_config=vision, text_config=text, image_grid_pinpoints=grids))
    strategy = {"vision_feature_select_strategy": "full"} if kind is LlavaNextModel else {}

    def pack(tiles: torch.Tensor, size: Size, newline: torch.Tensor) -> torch.Tensor:
        packed, lengths = model.pack_image_features(
            [tiles], [size[::-1]], image_newline=newline, **strategy
        )
        assert lengths.tolist() == [len(packed[0])]
        return packed[0]

    return pack


def numbered(tiles: int, positions: int) -> torch.Tensor:
    """Embeddings (N, P, 2) of which no two are equal: their number, which float32 has exactly, and
    its square root.
    """
    numbers = torch.arange(tiles * positions, dtype=torch.float32)
    return torch.stack([numbers, numbers.sqrt()], dim=1).view(tiles, positions, 2)


def compare_unpadded(layout: Anyres, side: int, patch: int, count: int) -> None:
    """Compare the processor's number of positions, ours, and the very positions that the model puts
    there.
    """
    grids = [list(pair) for pair in layout.grids]
    chosen = sizes(side, count)
    if layout.name == "anyres":
        processors = [
            next_processor(side, patch, grids, class_token) for class_token in (False, True)
        ]
    else:
        processors = [onevision_processor(side, patch, grids)]
    pack, newline = packer(layout, side, patch), torch.tensor([NEWLINE, NEWLINE])
    tilings = [layout.tiling(*size) for size in chosen]
    for processor in processors:
        numbers = processor._get_num_multimodal_tokens(
            [size[::-1] for size in chosen]
        ).num_image_tokens
        wrong = [
            (size, tiling, number)
            for size, tiling, number in zip(chosen, tilings, numbers, strict=True)
            if tiling.positions != number
        ]
        assert not wrong, (len(wrong), wrong[:3])
    for size, tiling in zip(chosen, tilings, strict=True):
        tiles = numbered(tiling.tiles, layout.positions_per_tile)
        found, expected = arranged(tiles, newline, [tiling]), pack(tiles, size, newline)
        assert torch.equal(found, expected), (size, tiling)
        assert (
            len(found) == tiling.positions
            and int((found[:, 0] == NEWLINE).sum()) == tiling.newlines
        ), (size, tiling)


def unpadded_layout(name: str, side: int, patch: int, grids: str = "default") -> Anyres:
    own = tuple((rows * side, columns * side) for rows, columns in OWN_GRIDS.get(grids, ()))
    return LAYOUTS[name]((side // patch) ** 2, side, pinpoints=own)


@pytest.mark.parametrize(
    ("name", "side", "patch"), [("anyres", 336, 14), ("anyres_max_9", 384, 14)]
)
def test_positions_are_the_stock_processors_and_what_the_stock_model_puts_there(name, side, patch):
    for grids, count in (("default", 200), *((own, 0) for own in OWN_GRIDS)):
        compare_unpadded(unpadded_layout(name, side, patch, grids), side, patch, count)


@pytest.mark.nightly
@pytest.mark.parametrize("grids", ["default", *OWN_GRIDS])
@pytest.mark.parametrize(("side", "patch"), ENCODERS)
@pytest.mark.parametrize("name", ["anyres", "anyres_max_9"])
def test_10_000_sizes_are_those_of_the_stock_classes(name, side, patch, grids):
    count = 10_000 if grids == "default" else 1_000
    compare_unpadded(unpadded_layout(name, side, patch, grids), side, patch, count)


def compare_tiled(side: int, patch: int, factor: int, max_tiles: int, count: int) -> None:
    """Compare grids, numbers of tiles, and the text that the processor writes."""
    positions = (side // (patch * factor)) ** 2
    layout = Tiles(positions, side, max_tiles)
    pictures = GotOcr2ImageProcessorPil(**square(side), crop_to_patches=True, max_patches=max_tiles)
    processor = AyaVisionProcessor(
        pictures,
        tokenizer(),
        patch,
        side,
        downsample_factor=factor,
        start_of_img_token="",
        end_of_img_token=".",
    )
    chosen, mark = sizes(side, count), processor.img_patch_token
    expected = processor._get_num_multimodal_tokens([size[::-1] for size in chosen])
    texts = {}
    for size, tiles in zip(chosen, expected.num_image_patches, strict=True):
        tiling = layout.tiling(*size)
        assert tiling.tiles == tiles == pictures.get_number_of_image_patches(*size[::-1]), (
            size,
            tiling,
        )
        grid = get_optimal_tiled_canvas(size[::-1], (side, side), 1, max_tiles)
        assert (tiling.columns, tiling.rows) == grid and tiling.tiles <= layout.most_tiles, (
            size,
            tiling,
        )
        if tiles not in texts:
            texts[tiles] = processor.replace_image_token({"num_patches": [tiles]}, 0)
            parts = (
                mark * piece if isinstance(piece, int) else piece for piece in layout.pieces(tiling)
            )
            assert "".join(parts) + "." == texts[tiles], (size, tiling)
        assert tiling.positions == texts[tiles].count(mark), (size, tiling)
    assert len(texts) > 3 or max_tiles < 4, "sizes of many grids"


def test_tiles_and_texts_are_those_of_the_stock_processor():
    for max_tiles in MAX_TILES:
        compare_tiled(448, 14, 2, max_tiles, 200)
    compare_tiled(384, 14, 3, 12, 100)


@pytest.mark.nightly
@pytest.mark.parametrize("max_tiles", [*MAX_TILES, 2, 20])
@pytest.mark.parametrize(("side", "patch", "factor"), SHUFFLED)
def test_10_000_sizes_are_cut_as_the_stock_processor_cuts_them(side, patch, factor, max_tiles):
    compare_tiled(side, patch, factor, max_tiles, 10_000)


def test_grids_that_are_not_named_are_the_stock_classes_own():
    for layout, config in (
        (Anyres(1, 336), LlavaNextConfig()),
        (AnyresMax9(1, 384), LlavaOnevisionConfig()),
    ):
        assert layout.image_settings == {"image_grid_pinpoints": config.image_grid_pinpoints}


def test_each_of_several_images_of_a_sample_is_one_tile_and_a_newline_where_the_class_has_it_so():
    layout = unpadded_layout("anyres_max_9", 384, 14)
    processor = onevision_processor(384, 14, [list(pair) for pair in layout.grids])
    pack, newline = packer(layout, 384, 14), torch.tensor([NEWLINE, NEWLINE])
    tile, inputs = numbered(1, 729), {"batch_num_images": [2, 3]}
    for size in special_sizes(384):
        tiling = layout.tiling(*size, images=2)
        assert (tiling.tiles, tiling.positions) == (
            1,
            processor.replace_image_token(inputs, 4).count("<image>"),
        )
        assert torch.equal(arranged(tile, newline, [tiling]), pack(tile, size, newline))
    of_next, of_tiles = unpadded_layout("anyres", 336, 14), Tiles(64, 448)
    for other in (of_next, of_tiles):
        assert other.tiling(640, 480, images=3) == other.tiling(640, 480), (
            "the others cut them one by one"
        )


def test_images_of_different_grids_lie_one_after_the_other():
    layout = unpadded_layout("anyres_max_9", 384, 14)
    pack, newline = packer(layout, 384, 14), torch.tensor([NEWLINE, NEWLINE])
    shapes = [(640, 480), (20, 2500), (2304, 2304), (5, 5)]
    tilings = [
        layout.tiling(*shapes[0]),
        layout.tiling(1, 1, images=2),
        *(layout.tiling(*size) for size in shapes[1:]),
    ]
    tiles = numbered(sum(tiling.tiles for tiling in tilings), 729)
    parts = tiles.split([tiling.tiles for tiling in tilings])
    sizes_of = [shapes[0], (1, 1), *shapes[1:]]
    expected = torch.cat(
        [pack(part, size, newline) for part, size in zip(parts, sizes_of, strict=True)]
    )
    assert torch.equal(arranged(tiles, newline, tilings), expected)


def test_a_line_that_would_be_interpolated_away_is_unfit_as_in_the_stock_model():
    layout = AnyresMax9(49, 98, pinpoints=((98, 98 * 80),))
    with pytest.raises(UnfitImage, match="100000 x 20 pixels, so long and thin that 0 lines of"):
        layout.tiling(100_000, 20)
    with pytest.raises(RuntimeError, match="greater than 0"):
        packer(layout, 98, 14)(torch.zeros(81, 49, 2), (100_000, 20), torch.zeros(2))
    assert layout.tiling(2_500, 20).newlines == 1


def test_numbers_are_told_where_positions_depend_on_them_and_nowhere_else():
    grids = Anyres(729, 384).grids
    layouts = [
        *(Tiles(729, 384), Tiles(729, 384, max_tiles=4), Tiles(729, 336)),
        *(
            Anyres(729, 384),
            AnyresMax9(729, 384, grids),
            Anyres(729, 384, grids[:2]),
            Square(729),
            Square(64),
        ),
    ]
    assert len({layout.numbers for layout in layouts}) == len(layouts)
    assert (
        Square(729, 384).numbers == Square(729).numbers
        and Anyres(729, 384, grids).numbers == layouts[3].numbers
    )


def test_keys_take_the_names_of_their_tables():
    assert get_args(LayoutName) == tuple(LAYOUTS)
    assert get_args(DataSection.model_fields["images"].annotation) == tuple(TEXT_ALONE)
    quantize, _ = get_args(LlmSection.model_fields["quantize"].annotation)
    assert get_args(quantize) == get_args(Quantisation) == tuple(QUANTISATIONS)

"""MoonViT and RICE: names of their published weights, and features that their published code made."""

from __future__ import annotations

import torch
from torch import nn
from transformers import MLCDVisionConfig, MLCDVisionModel

from mmtrain.model.encoder.moonvit import MoonViTConfig, MoonViTModel

PATCH = 4
GRIDS = ((4, 6), (2, 8), (8, 4), (2, 2))
COUNTS = [rows * columns for rows, columns in GRIDS]
SIZES = {"num_hidden_layers": 3, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48,
         "patch_size": PATCH}  # fmt: skip
# Features 0 and 7 of each image's last patch, from the weights and pixels below; RICE's with eps 1e-5 in all norms.
MOONVIT = [-1.194777, -0.088258, -0.155905, 0.937173, -1.75689, 0.591961, -1.998754, 0.127943]
RICE = [-7.929462, -1.080809, -7.7005, -1.958241, -2.470499, 1.13939, -2.759788, 1.204168]
# RICE's names in LLaVA-OneVision 1.5 (without `visual.`), whose weights are MLCD's: part by part of a name.
FROM_RICE = (
    ("patch_embed.proj.", "embeddings.patch_embedding."), ("class_embedding", "embeddings.class_embedding"),
    ("blocks.", "encoder.layers."), ("pre_layernorm", "pre_layrnorm"), (".norm", ".layer_norm"),
    (".attn.proj.", ".self_attn.out_proj."),
)  # fmt: skip


def waves(shape: torch.Size | tuple[int, ...], phase: float) -> torch.Tensor:
    """Values in [-1, 1] that no random generator decides; float64 sines, so that all machines agree."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) * 1.7 + phase).sin().float().view(shape)


def wave_weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """A phase for each name in order, norms around 1."""
    weights = {}
    for phase, (name, shape) in enumerate(sorted(shapes.items())):
        is_norm = ("norm" in name or "ln_q" in name) and name.endswith("weight")
        weights[name] = waves(shape, phase) * 0.3 + float(is_norm)
    return weights


def features(model: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(*inputs).last_hidden_state


PIXELS = waves((sum(COUNTS), 3 * PATCH**2), 0.5).split(COUNTS)


def test_moonvit_computes_what_its_published_code_does():
    model = MoonViTModel(MoonViTConfig(**SIZES, init_pos_emb_height=6, init_pos_emb_width=4))
    model.load_state_dict(wave_weights({name: tuple(value.shape) for name, value in model.state_dict().items()}))
    places = [torch.cartesian_prod(torch.arange(rows), torch.arange(columns)) for rows, columns in GRIDS]
    borders = torch.tensor([0, *COUNTS]).cumsum(0)
    grids = torch.tensor([(1, *grid) for grid in GRIDS])
    found = features(model, torch.cat(PIXELS), grids, torch.cat(places), borders, max(COUNTS)).split(COUNTS)
    last = torch.stack([image[-1, [0, 7]] for image in found]).flatten()
    torch.testing.assert_close(last, torch.tensor(MOONVIT), rtol=1e-5, atol=1e-5)


def test_rice_is_an_mlcd():
    """Each image by itself: the published code of LLaVA-OneVision 1.5 reads several in a call at wrong rows."""
    rice = {"class_embedding": (32,), "class_pos_emb": (1, 4), "patch_embed.proj.weight": (32, 3, PATCH, PATCH)}
    names = ["pre_layernorm", *(f"blocks.{block}.norm{norm}" for block in range(3) for norm in (1, 2))]
    rice |= {f"{name}.{kind}": (32,) for name in names for kind in ("weight", "bias")}
    for block in range(3):
        for name, outputs, inputs in (("attn.qkv", 96, 32), ("attn.proj", 32, 32), ("mlp.fc1", 48, 32),
                                      ("mlp.fc2", 32, 48)):  # fmt: skip
            rice |= {f"blocks.{block}.{name}.weight": (outputs, inputs), f"blocks.{block}.{name}.bias": (outputs,)}
    merger = {"ln_q": (32,), "mlp.0": (128, 128), "mlp.2": (24, 128)}  # between the others in the order of names
    merged = {f"merger.{name}.weight": shape for name, shape in merger.items()}
    merged |= {f"merger.{name}.bias": shape[:1] for name, shape in merger.items()}
    state = {}
    for name, tensor in wave_weights(rice | merged).items():
        if name.startswith("merger."):
            continue
        for theirs, stock in FROM_RICE:
            name = name.replace(theirs, stock)
        if ".attn.qkv." in name:
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                state[name.replace(".attn.qkv.", f".self_attn.{part}_proj.")] = piece
        else:
            state[name] = tensor
    model = MLCDVisionModel(MLCDVisionConfig(**SIZES, image_size=16, layer_norm_eps=1e-5))
    missing = model.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys and set(missing.missing_keys) == {"post_layernorm.weight", "post_layernorm.bias"}
    last = []
    for patches, (rows, columns) in zip(PIXELS, GRIDS, strict=True):  # in blocks of 2 x 2
        apart = patches.view(rows // 2, columns // 2, 2, 2, 3, PATCH, PATCH).permute(4, 0, 2, 5, 1, 3, 6)
        picture = apart.reshape(1, 3, rows * PATCH, columns * PATCH)
        last.append(features(model, picture)[0, -1, [0, 7]])
    torch.testing.assert_close(torch.cat(last), torch.tensor(RICE), rtol=1e-5, atol=1e-5)


def test_names_and_shapes_of_moonvit_are_those_of_its_published_weights():
    """moonshotai/MoonViT-SO-400M: 416,866,032 parameters in 329 tensors."""
    outside = {
        "patch_embed.proj.weight": (1152, 3, 14, 14),
        "patch_embed.proj.bias": (1152,),
        "patch_embed.pos_emb.weight": (64, 64, 1152),
        "encoder.final_layernorm.weight": (1152,),
        "encoder.final_layernorm.bias": (1152,),
    }
    matrices = {"wqkv": (3456, 1152), "wo": (1152, 1152), "mlp.fc0": (4304, 1152), "mlp.fc1": (1152, 4304)}
    block = {f"{name}.weight": shape for name, shape in matrices.items()}
    block |= {f"{name}.bias": shape[:1] for name, shape in matrices.items()}
    block |= {f"norm{norm}.{kind}": (1152,) for norm in (0, 1) for kind in ("weight", "bias")}
    with torch.device("meta"):
        found = {name: tuple(value.shape) for name, value in MoonViTModel(MoonViTConfig()).state_dict().items()}
    assert found == outside | {f"encoder.blocks.{i}.{name}": shape for i in range(27) for name, shape in block.items()}

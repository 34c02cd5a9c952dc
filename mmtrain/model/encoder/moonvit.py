"""MoonViT, as Moonshot AI publishes it alone (MoonViT-SO-400M) and in Kimi-VL; transformers has no
class for it.

    pixel_values (P, 3 S S), row by row of each image's patches --patches, positions resized to each
        image, blocks,
        norm--> last_hidden_state (P, W)

Parameters have their published names. Source: `modeling_moonvit.py` of moonshotai/MoonViT-SO-400M,
with which it was compared on random weights (3e-7 of the largest feature).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from mmtrain.model.llm.attention import IMAGES_FLASH, images_attention

Rotation = tuple[Tensor, Tensor]  # cosines and sines (P, 1, head width / 2) in float32


class MoonViTConfig(PreTrainedConfig):
    model_type = "moonvit"

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    patch_size: int = 14
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64


class _Positions(nn.Module):
    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.zeros(config.init_pos_emb_height, config.init_pos_emb_width, config.hidden_size)
        )

    def forward(self, grids: list[list[int]]) -> Tensor:
        table = self.weight.permute(2, 0, 1)[None]
        positions = []
        for _, *size in grids:
            resized = F.interpolate(table, size, mode="bicubic")[0]
            positions.append(resized.flatten(1).T)
        return torch.cat(positions)


class _Patches(nn.Module):
    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(
            3,
            config.hidden_size,
            config.patch_size,
            stride=config.patch_size,
        )
        self.pos_emb = _Positions(config)

    def forward(
        self,
        pixel_values: Tensor,
        grids: list[list[int]],
    ) -> Tensor:
        patches = pixel_values.unflatten(1, self.proj.weight.shape[1:])
        return self.proj(patches).flatten(1) + self.pos_emb(grids)


class _Mlp(nn.Module):
    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.fc0 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.fc1 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.fc1(F.gelu(self.fc0(hidden), approximate="tanh"))


class _Block(nn.Module):
    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.config = config
        self.norm0 = nn.LayerNorm(config.hidden_size, eps=1e-5)
        self.norm1 = nn.LayerNorm(config.hidden_size, eps=1e-5)
        self.wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.wo = nn.Linear(config.hidden_size, config.hidden_size)
        self.mlp = _Mlp(config)

    def forward(
        self,
        hidden: Tensor,
        borders: Tensor,
        longest: int,
        rotation: Rotation,
    ) -> Tensor:
        hidden = hidden + self.attention(self.norm0(hidden), borders, longest, rotation)
        return hidden + self.mlp(self.norm1(hidden))

    def attention(
        self,
        normed: Tensor,
        borders: Tensor,
        longest: int,
        rotation: Rotation,
    ) -> Tensor:
        together = self.wqkv(normed).unflatten(1, (3, self.config.num_attention_heads, -1))
        query, key, value = together.unbind(1)
        scale = query.shape[-1] ** -0.5
        turned = (_turned(query, *rotation), _turned(key, *rotation), value)
        heads = [part.transpose(0, 1)[None] for part in turned]
        if self.config._attn_implementation == IMAGES_FLASH:
            attended, _ = images_attention(
                self,
                *heads,
                None,
                scale,
                borders,
                longest,
            )
        else:
            lengths = borders.diff().tolist()
            images = zip(*(part.split(lengths, 2) for part in heads), strict=True)
            parts = [F.scaled_dot_product_attention(*image) for image in images]
            attended = torch.cat(parts, 2).transpose(1, 2)
        return self.wo(attended[0].flatten(1))


def _turned(
    heads: Tensor,
    cosines: Tensor,
    sines: Tensor,
) -> Tensor:
    """Rotate features 2 i and 2 i + 1 of each head (P, heads, width) as a pair, in float32."""
    first, second = heads.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack(
        [first * cosines - second * sines, first * sines + second * cosines],
        -1,
    )
    return turned.flatten(-2).to(heads.dtype)


class _Encoder(nn.Module):
    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.num_hidden_layers))
        self.final_layernorm = nn.LayerNorm(config.hidden_size, eps=1e-5)


class MoonViTModel(PreTrainedModel):
    config_class = MoonViTConfig
    main_input_name = "pixel_values"
    _supports_sdpa = True

    def __init__(self, config: MoonViTConfig) -> None:
        super().__init__(config)
        self.patch_embed = _Patches(config)
        self.encoder = _Encoder(config)
        self.post_init()

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
    ) -> BaseModelOutput:
        """Encode images of grids (N, 3) on the host; `position_ids` (P, 2) are rows and columns."""
        width = self.config.hidden_size // self.config.num_attention_heads
        steps = torch.arange(
            0,
            width,
            4,
            device=pixel_values.device,
            dtype=torch.float32,
        )
        # column, then row
        angles = position_ids.flip(1)[:, None, :] * (1 / 10_000 ** (steps / width))[None, :, None]
        angles = angles.flatten(1)[:, None]
        rotation = angles.cos(), angles.sin()
        hidden = self.patch_embed(pixel_values, grid_thw.tolist())
        for block in self.encoder.blocks:
            hidden = block(hidden, cu_seqlens, max_seqlen, rotation)
        return BaseModelOutput(last_hidden_state=self.encoder.final_layernorm(hidden))

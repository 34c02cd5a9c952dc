"""Write llama.cpp's mmproj file of an exported Llava: encoder and projector, for llama-server
--mmproj.

python tools/export_mmproj.py EXPORT OUT.gguf (pip install gguf). llama.cpp's own
convert_hf_to_gguf.py makes the file of the LLM from the same folder, but takes no CLIP or SigLIP
with --mmproj. Tried with llama.cpp of October 2026.

Needed: a SigLIP (a timm one is exported as such), mlp2x_gelu, a square per image. A CLIP is
refused: llama.cpp puts its class token last, but takes the patches behind the first token (issue
25814 there).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
from safetensors import safe_open

T, NAMES = gguf.MODEL_TENSOR, gguf.TENSOR_NAMES
BLOCK = {
    "self_attn.q_proj": T.V_ENC_ATTN_Q,
    "self_attn.k_proj": T.V_ENC_ATTN_K,
    "self_attn.v_proj": T.V_ENC_ATTN_V,
    "self_attn.out_proj": T.V_ENC_ATTN_O,
    "layer_norm1": T.V_ENC_INPUT_NORM,
    "layer_norm2": T.V_ENC_POST_ATTN_NORM,
    "mlp.fc1": T.V_ENC_FFN_UP,
    "mlp.fc2": T.V_ENC_FFN_DOWN,
}


def refusal(config: Mapping[str, Any]) -> str | None:
    """Say what llama.cpp would compute otherwise of a config.json; None where it computes the
    same.
    """
    kind = config.get("vision_config", {}).get("model_type")
    if config.get("model_type") != "llava" or config.get("projector_hidden_act") != "gelu":
        return "is no Llava with an mlp2x_gelu projector"
    if kind != "siglip_vision_model":
        return (
            f"has the encoder {kind}; llama.cpp computes a SigLIP exactly, but takes the wrong "
            "patches of a CLIP"
        )
    return None


def write(folder: Path, out: Path) -> None:
    """Write the file: settings, then the tensors of the blocks that run, matrices in float16."""
    config = json.loads((folder / "config.json").read_text())
    images = json.loads((folder / "preprocessor_config.json").read_text())
    vision, layer = config["vision_config"], config["vision_feature_layer"]
    # blocks that run; the last norm does not
    used = layer if layer >= 0 else vision["num_hidden_layers"] + 1 + layer
    writer = gguf.GGUFWriter(out, "clip")
    writer.add_type("mmproj")
    writer.add_clip_has_vision_encoder(True)
    writer.add_clip_projector_type("mlp")  # gguf.VisionProjectorType has no name for it
    writer.add_vision_projection_dim(config["text_config"]["hidden_size"])
    writer.add_vision_image_size(vision["image_size"])
    writer.add_vision_patch_size(vision["patch_size"])
    writer.add_vision_embedding_length(vision["hidden_size"])
    writer.add_vision_feed_forward_length(vision["intermediate_size"])
    writer.add_vision_block_count(used)
    # without it llama.cpp leaves the last block out
    writer.add_array("clip.vision.feature_layer", [used])
    writer.add_vision_head_count(vision["num_attention_heads"])
    writer.add_vision_attention_layernorm_eps(vision["layer_norm_eps"])
    writer.add_vision_image_mean(images["image_mean"])
    writer.add_vision_image_std(images["image_std"])
    writer.add_vision_use_gelu(True)  # else its quick_gelu
    names = {
        "embeddings.patch_embedding": NAMES[T.V_ENC_EMBD_PATCH],
        "embeddings.position_embedding": NAMES[T.V_ENC_EMBD_POS],
        "multi_modal_projector.linear_1": NAMES[T.V_MMPROJ].format(bid=0),
        "multi_modal_projector.linear_2": NAMES[T.V_MMPROJ].format(bid=2),
    }
    for block in range(used):
        names |= {
            f"encoder.layers.{block}.{own}": NAMES[to].format(bid=block)
            for own, to in BLOCK.items()
        }
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - no dictionary
                own = (
                    name.removeprefix("model.")
                    .removeprefix("vision_tower.")
                    .removeprefix("vision_model.")
                )
                module, _, which = own.rpartition(".")
                if module in names:
                    values, in_full = tensors.get_tensor(name), module.startswith("embeddings.")
                    values = values.float() if in_full or values.dim() == 1 else values.half()
                    writer.add_tensor(f"{names[module]}.{which}", values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "export", type=Path, metavar="EXPORT", help="folder of mmtrain export --format hf"
    )
    parser.add_argument("out", type=Path, metavar="OUT.gguf", help="file to write; must not exist")
    options = parser.parse_args()
    if why := refusal(json.loads((options.export / "config.json").read_text())):
        parser.error(f"{options.export}: {why}")
    if options.out.exists():
        parser.error(f"{options.out}: exists")
    write(options.export, options.out)


if __name__ == "__main__":
    main()

"""Tiny vision models of transformers, one of each family that trains, and of folders that hold more
than an encoder.
"""

from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    InternVLConfig,
    InternVLForConditionalGeneration,
    InternVLVisionConfig,
    InternVLVisionModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

HF_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 7,
}
DINO_SIZES = {name: size for name, size in HF_SIZES.items() if name != "intermediate_size"}
NATIVE_SIZES = {name: size for name, size in HF_SIZES.items() if name != "image_size"}
QWEN_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "depth": 4,
    "num_heads": 4,
    "patch_size": 7,
    "out_hidden_size": 24,
}
WINDOWS = {"fullatt_block_indexes": [1, 3], "window_size": 28}  # pixels
TABLE = {"num_position_embeddings": 16}
TEXT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}
# Encoders of transformers, by what their folder holds: (a model, the encoder in it, its tokens
# before patches).
ENCODERS = {
    "clip_vision": (lambda: CLIPVisionModel(CLIPVisionConfig(**HF_SIZES)), "", 1),
    "clip": (
        lambda: CLIPModel(CLIPConfig(vision_config=HF_SIZES, text_config=TEXT, projection_dim=16)),
        "vision_model",
        1,
    ),
    "siglip": (lambda: SiglipVisionModel(SiglipVisionConfig(**HF_SIZES)), "", 0),
    "dinov2": (lambda: Dinov2Model(Dinov2Config(**DINO_SIZES)), "", 1),
    "dinov2_classifier": (
        lambda: Dinov2ForImageClassification(Dinov2Config(**DINO_SIZES)),
        "dinov2",
        1,
    ),
    "dinov2_registers": (
        lambda: Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**DINO_SIZES)),
        "",
        5,
    ),
    "dinov3": (lambda: DINOv3ViTModel(DINOv3ViTConfig(**HF_SIZES, num_register_tokens=2)), "", 3),
    "vit": (lambda: ViTModel(ViTConfig(**HF_SIZES)), "", 1),
    "vit_classifier": (lambda: ViTForImageClassification(ViTConfig(**HF_SIZES)), "vit", 1),
    "internvit": (lambda: InternVLVisionModel(InternVLVisionConfig(**HF_SIZES)), "", 1),
    "internvl": (
        lambda: InternVLForConditionalGeneration(
            InternVLConfig(vision_config=HF_SIZES, text_config={"model_type": "qwen2"} | TEXT)
        ),
        "model.vision_tower",
        1,
    ),
}

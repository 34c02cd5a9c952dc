"""What a refusal to export a whole model says of the formats that need less."""

WHAT_WORKS = "--format safetensors exports any projector, --format llava any that was trained alone"

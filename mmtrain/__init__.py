"""mmtrain: train a vision-language projector between a frozen vision encoder and a frozen, pipeline-parallel LLM."""

__version__ = "0.1.0"

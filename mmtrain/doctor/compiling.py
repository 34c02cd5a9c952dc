"""The check of torch's compiler, which needs a C compiler and, on a GPU, Triton."""

from pathlib import Path

import torch
from transformers import LlamaConfig

from mmtrain.doctor.check import FailedError, SkippedError
from mmtrain.model.llm.compiled import Compiler, compiling
from mmtrain.model.llm.kernels import describe_backends
from mmtrain.model.llm.language import slice_of
from mmtrain.model.llm.tiny import tiny_model

TOKENS = 64


def compiled_layer(folder: Path) -> str:
    """Compile a tiny decoder layer and compare its results and gradients with eager ones."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda")
    part = slice_of(
        tiny_model(LlamaConfig(num_hidden_layers=1), seed=0),
        0,
        1,
        embedding=True,
        head=True,
    )
    part.to(device)
    hidden = torch.randn(1, TOKENS, part.hidden_size, device=device)
    compiler = Compiler("auto", folder / "compiled", deterministic=True)
    part.compile_layers(compiler)
    with compiling(), torch.no_grad():
        [chosen] = compiler.choose(lambda: part(hidden, torch.arange(TOKENS)[None]))
    [text] = describe_backends([{chosen}])[1]
    if chosen.reason is None:
        return text
    remedy = (
        "if a compiler is missing, install gcc and g++, and the Triton that comes with torch; "
        "until then runs are right but slower"
    )
    if device.type == "cuda":
        raise FailedError(text, remedy)
    raise SkippedError(f"{text}. Runs on a CPU compile only with train.compile=true; {remedy}")

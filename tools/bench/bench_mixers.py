"""Recurrent layers over packs: what it costs to keep documents apart, against the stock mixer,
which mixes them.

one decoder layer's mixer, forward and input gradient of a pack, bfloat16 on a GPU, float32 on a
CPU:
  leaking   the stock mixer over the whole pack; wrong, but the fastest there is
  mmtrain   document by document, those of one length in one call; all in one where a GPU's kernels
            take borders
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_tables import alternate, as_dict, finish, positive, print_table, ratios, spread
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from mmtrain.base.printing import print_info
from mmtrain.doctor.machine import describe_machine
from mmtrain.model.llm.bookends import decoder_layers
from mmtrain.model.llm.kernels import record_backends
from mmtrain.model.llm.mixers import ByDocument, Sequences, mixers_of, running_on

EXAMPLES = """\
examples:
  the mixers of three models, an eighth as wide, packs of 2,048 tokens:
    python tools/bench/bench.py mixers --json mixers.json
  at full width on a GPU, which also says which kernels run:
    python tools/bench/bench.py mixers --device cuda --width 1 --tokens 8192
"""
LAYERS: dict[str, dict[str, Any]] = {  # family and sizes; heads and hidden width shrink
    "Qwen3.5-9B": {
        "family": "qwen3_5_text",
        "hidden_size": 4096,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "layer_types": ["linear_attention"],
    },
    "granite-4.0-h-small": {
        "family": "granitemoehybrid",
        "hidden_size": 4096,
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_chunk_size": 256,
        "num_local_experts": 0,
        "layer_types": ["mamba"],
    },
    "LFM2-1.2B": {
        "family": "lfm2",
        "hidden_size": 2048,
        "layer_types": ["conv"],
        "block_auto_adjust_ff_dim": False,
    },
}
SHRINKS = ("hidden_size", "linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads")


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cpu", help="(%(default)s)")
    add("--tokens", type=positive, default=2048, metavar="N", help="of a pack (%(default)s)")
    add(
        "--documents",
        type=positive,
        nargs="+",
        default=[1, 8, 64],
        metavar="N",
        help="of a pack (1 8 64)",
    )
    add(
        "--width", type=positive, default=8, metavar="N", help="divide widths by this (%(default)s)"
    )
    add("--repetitions", type=positive, default=7, metavar="N", help="(%(default)s)")
    add("--json", type=Path, metavar="FILE", help="write every single measurement there")


def run(options: argparse.Namespace) -> int:
    device = torch.device(options.device)
    result: dict[str, Any] = {"machine": describe_machine(), "device": options.device, "rows": {}}
    rows = []
    for name, sizes in LAYERS.items():
        mixer, width = make_mixer(sizes, options.width, device)
        stock, ours = mixer.forward, ByDocument(mixer)
        dtype = next(mixer.parameters()).dtype
        hidden = torch.randn(1, options.tokens, width, device=device, dtype=dtype).requires_grad_()
        for count in options.documents:
            sequences = Sequences.of_positions(positions(options.tokens, count), device)
            with running_on(sequences), record_backends() as backends:
                contestants = {"leaking": timed(stock, hidden), "mmtrain": timed(ours, hidden)}
                times = alternate(contestants, options.repetitions + 1)
            # the first one warms up
            times = {contestant: values[1:] for contestant, values in times.items()}
            cost = ratios(times, "leaking", "mmtrain")
            seconds = {contestant: spread(values) for contestant, values in times.items()}
            result["rows"][f"{name}, {count} documents"] = as_dict(
                {"seconds": seconds, "cost": {"mmtrain": cost}}
            )
            texts = (
                seconds["leaking"].text(".4f"),
                seconds["mmtrain"].text(".4f"),
                cost.text(".2f"),
            )
            rows.append((name, count, *texts, next(iter(backends)).kernel))
    print_table(("mixer of", ">documents", ">leaking s", ">mmtrain s", ">cost", "kernel"), rows)
    print_info(
        "cost: seconds of mmtrain over those of the stock mixer, which leaks, in the same turn"
    )
    finish(result, options.json)
    return 0


def make_mixer(
    sizes: dict[str, Any], divisor: int, device: torch.device
) -> tuple[torch.nn.Module, int]:
    """Make the frozen mixer of a model's layer, with the stock class's starting weights; also its
    hidden width.
    """
    own = {key: value // divisor if key in SHRINKS else value for key, value in sizes.items()}
    small = {
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "intermediate_size": 64,
        "shared_intermediate_size": 64,
    }
    few = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = CONFIG_MAPPING[own.pop("family")](**small, **few, **own)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="sdpa", trust_remote_code=False
        )
    model.eval().requires_grad_(False)
    return mixers_of(decoder_layers(model)[0])[0], config.hidden_size


def positions(tokens: int, documents: int) -> torch.Tensor:
    """Positions (1, L) of documents whose borders are drawn, the same every time."""
    generator = torch.Generator().manual_seed(documents)
    borders = torch.randperm(tokens - 1, generator=generator)[: documents - 1].add(1).sort().values
    lengths = torch.tensor([0, *borders.tolist(), tokens]).diff().tolist()
    return torch.cat([torch.arange(length) for length in lengths])[None]


def timed(forward: Callable[..., Any], hidden: torch.Tensor) -> Callable[[], float]:
    def seconds() -> float:
        torch.get_device_module(hidden.device).synchronize()
        began = time.perf_counter()
        output = forward(hidden)
        torch.autograd.grad((output[0] if isinstance(output, tuple) else output).sum(), hidden)
        torch.get_device_module(hidden.device).synchronize()
        return time.perf_counter() - began

    return seconds

"""Compiled layers: what eager ones compute, in every way in which a stage runs them; planted faults
end in eager.
"""

from __future__ import annotations

import functools
import re
import stat
import time
from collections import Counter

import pytest
import torch
from families import FAMILIES, family_config
from fp8_products import needs_fp8_products
from sweeps import sweep
from tiers import nightly
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition
from transformers import CONFIG_MAPPING
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from mmtrain.base.errors import UserError
from mmtrain.config.model import LoraSection
from mmtrain.facts.families import canonical_name
from mmtrain.model.encoder.vision import load_vision, made_up_encoder
from mmtrain.model.llm.bookends import decoder_layers
from mmtrain.model.llm.compiled import Compiler, compiling
from mmtrain.model.llm.language import causal_config, slice_of
from mmtrain.model.llm.tiny import draw_scales, tiny_model
from mmtrain.model.trained.lora import add_adapters
from mmtrain.model.weights.streaming import StreamedLayers
from mmtrain.model.weights.weight_sources import HostSource, quantised_source

CPU = torch.device("cpu")
LAYERS = 4
# lengths of the documents of two rows of 38 tokens
BATCHES = (
    ((19, 19), (19, 19)),
    ((13, 6, 19), (13, 6, 19)),
    ((20, 18), (5, 33)),
    ((38,), (10, 10, 10, 8)),
    ((7, 31), (1, 37)),
)
PLACES = torch.tensor([2, 3, 9, 11, 28, 36, 40, 41, 60])
WAYS = (
    "plain",
    "recomputed",
    "streamed",
    "streamed, recomputed",
    "nf4",
    "int8",
    "LoRA",
    "LoRA, recomputed",
    "rows",
    "rows, recomputed",
    "M-RoPE",
    "a trained layer",
)
DAILY = ("llama",)  # a family costs 15 to 40 s of a C++ compiler
DAILY_WAYS = ("streamed, recomputed", "LoRA, recomputed", "M-RoPE")


@pytest.fixture(autouse=True)
def _anew():
    """Forget compiled code of other tests, and let torch compile again afterwards."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch.compiler.set_stance("default")


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.getbasetemp() / "compiled"


def positions(batch):
    rows = [torch.cat([torch.arange(length) for length in row]) for row in batch]
    return torch.stack(rows)


def choose(part, run, folder, mode=True, **options):
    """Let a compiler choose how a slice's layers run, and return what it says of each class."""
    compiler = Compiler(mode, folder, **{"deterministic": False, **options})
    part.compile_layers(compiler)
    with compiling(), torch.no_grad():
        return compiler.choose(run)


def outcomes(part, run, batches):
    """Return results and all gradients, a micro-batch after the other."""
    found = []
    for number, batch in enumerate(batches):
        generator = torch.Generator().manual_seed(number)
        hidden = torch.randn(2, 38, part.hidden_size, generator=generator).requires_grad_()
        part.model.zero_grad()
        result = run(hidden, positions(batch))
        weights = torch.randn(result.shape, generator=generator)
        (result * weights).sum().backward()
        trained = [p.grad for p in part.model.parameters() if p.requires_grad]
        found += [result.detach(), hidden.grad, *trained]
        if part.streamed is not None:
            part.streamed.end()
    return found


def assert_equal_within(bound, ours, expected):
    for one, other in zip(ours, expected, strict=True):
        assert (one - other).abs().max() <= bound * other.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("family", sweep(FAMILIES, DAILY))
def test_a_family_compiled_gives_eager_results_and_other_borders_are_no_new_code(family, cache):
    config = family_config(family, **{"num_hidden_layers": 6, **FAMILIES[family]})
    if family == "opt":
        # at a ReLU's kink a rounding error may switch a gradient on
        config.activation_function = "gelu"
    part = slice_of(tiny_model(draw_scales(config, 1), 0), 0, 6, embedding=True, head=True)

    def logits(hidden, position_ids):
        return part.logits(part(hidden, position_ids).flatten(0, 1))

    expected = outcomes(part, logits, BATCHES)
    for start in ("first", "second"):
        chosen = choose(part, lambda: part(torch.randn(2, 38, 64), positions(BATCHES[0])), cache)
        assert {way.kernel for way in chosen} == {"compiled"}
        with compiling():
            outcomes(part, logits, BATCHES[:1])
            graphs = counters["stats"]["unique_graphs"]
            assert_equal_within(1e-4, outcomes(part, logits, BATCHES), expected)
        assert counters["stats"]["unique_graphs"] == graphs > 0
        if start == "second":
            assert counters["inductor"]["fxgraph_cache_miss"] == 0
        torch._dynamo.reset()
        counters.clear()


@pytest.mark.parametrize("backend", sweep(("aot_eager", "inductor"), ("aot_eager",)))
@pytest.mark.parametrize("way", sweep(WAYS, DAILY_WAYS))
def test_a_stage_computes_compiled_what_it_computes_eagerly(
    way, backend, cache, tmp_path, monkeypatch
):
    family = "llama"
    if way == "M-RoPE":
        family = "qwen2"
    config = CONFIG_MAPPING[family](num_hidden_layers=LAYERS)
    streamed = None
    if way == "M-RoPE":
        tiny_model(config, 0).save_pretrained(tmp_path)
        config = causal_config(tmp_path, mrope=True)
    elif "streamed" in way:
        streamed = StreamedLayers(HostSource(CPU))
    elif way in ("nf4", "int8", "fp8"):
        streamed = StreamedLayers(quantised_source(way, CPU))
    model = tiny_model(config, 0)
    part = slice_of(model, 0, LAYERS, embedding=True, head=True, streamed=streamed)
    if "LoRA" in way:
        section = LoraSection(r=4, alpha=8.0, targets=("q_proj", "v_proj", "down_proj"))
        add_adapters(part.model, section, canonical_name, 0)
        generator = torch.Generator().manual_seed(5)
        for name, parameter in part.model.named_parameters():
            if ".lora_" in name:
                parameter.data.uniform_(-0.3, 0.3, generator=generator)
                parameter.requires_grad_(True)
    if way == "a trained layer":
        for name, parameter in part.model.named_parameters():
            parameter.requires_grad_(".layers.2." in name)
    if "recomputed" in way:
        part.recompute(LAYERS - 1)
    if "rows" in way:
        part.narrow_last_layer()

    def run(hidden, position_ids):
        if way == "M-RoPE":
            grid = [torch.zeros_like(position_ids), position_ids // 5, position_ids % 5]
            position_ids = torch.stack([position_ids, *grid])
        if "rows" in way:
            return part.forward_rows(hidden, position_ids, PLACES)
        return part(hidden, position_ids)

    def run_once():
        run(torch.randn(2, 38, part.hidden_size), positions(BATCHES[0]))
        if streamed is not None:
            streamed.end()

    expected = outcomes(part, run, BATCHES)
    compile_with_it = functools.partial(torch.compile, backend=backend)
    monkeypatch.setattr(torch, "compile", compile_with_it)
    [chosen] = choose(part, run_once, cache)
    assert chosen.kernel == "compiled"
    with compiling():
        outcomes(part, run, BATCHES[:1])
        graphs = counters["stats"]["unique_graphs"]
        assert_equal_within(1e-4, outcomes(part, run, BATCHES), expected)
    assert counters["stats"]["unique_graphs"] == graphs > 0


def test_a_frozen_layers_backward_has_as_many_products_as_its_forward(tmp_path, monkeypatch):
    part = slice_of(
        tiny_model(CONFIG_MAPPING["llama"](num_hidden_layers=1), 0),
        0,
        1,
        embedding=True,
        head=True,
    )
    products = Counter()

    def counting(kind):
        def compiler(graph, inputs):
            for node in graph.graph.nodes:
                products[kind] += node.target in (torch.ops.aten.mm.default,)
            return graph

        return compiler

    backend = aot_autograd(
        fw_compiler=counting("forward"),
        bw_compiler=counting("backward"),
        inference_compiler=counting("evaluation"),
        partition_fn=min_cut_rematerialization_partition,
    )
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    choose(part, lambda: part(torch.randn(2, 38, 64), positions(BATCHES[0])), tmp_path)
    assert products == {"forward": 7, "backward": 7, "evaluation": 7}


@pytest.mark.parametrize("at_first", [4, 37, 192])  # also as many as tokens, and as wide
@pytest.mark.parametrize("kind", ["timm", "CLIP"])
def test_a_frozen_encoders_blocks_run_compiled_on_any_number_of_tiles(
    kind, at_first, parts, tmp_path, monkeypatch
):
    compile_with_it = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compile_with_it)
    tower = load_vision(str(parts / "vision"), -1, torch.float32)
    if kind == "timm":
        tower = made_up_encoder("vit_tiny_patch16_224", torch.float32, False, 3)
    size = (3, tower.image_size, tower.image_size)

    def features(tiles):
        generator = torch.Generator().manual_seed(tiles)
        return tower(torch.randn(tiles, *size, generator=generator))

    counts = (7, 2, at_first)
    with torch.no_grad():
        expected = [features(tiles) for tiles in counts]
        one = features(1)
        compiler = Compiler(True, tmp_path, deterministic=False)
        tower.compile_blocks(compiler)
        with compiling():
            [chosen] = compiler.choose(lambda: features(at_first))
        assert chosen.kernel == "compiled"
        assert_equal_within(1e-4, [features(1)], [one])  # eagerly
        torch.compiler.set_stance("fail_on_recompile")
        assert_equal_within(1e-4, [features(tiles) for tiles in counts], expected)


@needs_fp8_products
@pytest.mark.parametrize("family", sweep(("llama", "gemma2", "qwen3_moe"), ("llama",)))
def test_layers_kept_in_fp8_are_multiplied_in_fp8_where_all_but_rounding_agrees(
    family, tmp_path, monkeypatch
):
    compile_with_it = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compile_with_it)
    # of more layers than torch keeps variants
    config = family_config(family, num_hidden_layers=9)
    streamed = StreamedLayers(quantised_source("fp8", CPU))
    part = slice_of(tiny_model(config, 0), 0, 9, embedding=True, head=True, streamed=streamed)

    def run_once():
        part(torch.randn(2, 38, part.hidden_size), positions(BATCHES[0]))
        streamed.end()

    expected = outcomes(part, part, BATCHES)
    chosen = choose(part, run_once, tmp_path)
    assert {way.kernel for way in chosen} == {"compiled", "fp8"}
    graphs = counters["stats"]["unique_graphs"]
    with compiling():
        ours = outcomes(part, part, BATCHES)
    assert counters["stats"]["unique_graphs"] == graphs
    for one, other in zip(ours, expected, strict=True):
        # of 9 layers
        assert 0.01 < (one - other).norm() / other.norm() < 0.25
    # another number of tokens is computed eagerly, by the same products
    hidden = torch.randn(1, 5, part.hidden_size)
    assert part(hidden, torch.arange(5)[None]).isfinite().all()
    streamed.end()


@needs_fp8_products
@pytest.mark.nightly
def test_a_layer_that_trains_is_compiled_beside_layers_in_fp8(tmp_path, monkeypatch):
    compile_with_it = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compile_with_it)
    model = tiny_model(family_config("llama", num_hidden_layers=3), 0)
    part = slice_of(model, 0, 3, embedding=True, head=True)
    layers = decoder_layers(part.model)
    layers[1].requires_grad_(True)
    part.streamed = StreamedLayers(quantised_source("fp8", CPU))
    for number in (0, 2):
        part.streamed.take(number, layers[number])

    def run_once():
        part(torch.randn(2, 38, part.hidden_size), positions(BATCHES[0]))
        part.streamed.end()

    chosen = choose(part, run_once, tmp_path)
    assert {way.kernel for way in chosen} == {"compiled", "fp8"}
    outcomes(part, part, BATCHES[:1])
    assert all(p.grad.any() for p in layers[1].parameters())


@needs_fp8_products
@pytest.mark.parametrize("fault", ["no such kernel", nightly("wrong scales")])
def test_wrong_products_in_fp8_leave_the_weights_dequantised(fault, tmp_path, monkeypatch):
    compile_with_it = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compile_with_it)
    product = torch._scaled_mm

    def faulty(*arguments, **options):
        if fault == "no such kernel":
            raise RuntimeError("torch._scaled_mm is only supported on 8.9")
        options["scale_b"] = options["scale_b"] * 1.3
        return product(*arguments, **options)

    monkeypatch.setattr(torch, "_scaled_mm", faulty)
    streamed = StreamedLayers(quantised_source("fp8", CPU))
    model = tiny_model(family_config("llama", num_hidden_layers=2), 0)
    part = slice_of(model, 0, 2, embedding=True, head=True, streamed=streamed)

    def run_once():
        part(torch.randn(2, 38, part.hidden_size), positions(BATCHES[0]))
        streamed.end()

    expected = outcomes(part, part, BATCHES[:1])
    chosen = {way.kernel: way for way in choose(part, run_once, tmp_path)}
    assert chosen.keys() == {"compiled", "dequantised"}
    reason = {"wrong scales": "wrong results", "no such kernel": "only supported on 8.9"}
    assert reason[fault] in chosen["dequantised"].reason
    assert_equal_within(1e-4, outcomes(part, part, BATCHES[:1]), expected)


@pytest.fixture
def part():
    config = CONFIG_MAPPING["llama"](num_hidden_layers=2)
    return slice_of(tiny_model(config, 0), 0, 2, embedding=True, head=True)


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return 1.01 * gradient


def wrong_result(forward, *arguments, **options):
    return forward(*arguments, **options) * 1.01


def not_a_number(forward, *arguments, **options):
    return forward(*arguments, **options) * float("nan")


def wrong_gradient(forward, *arguments, **options):
    return WrongGradient.apply(forward(*arguments, **options))


def slower(forward, *arguments, **options):
    time.sleep(0.05)
    return forward(*arguments, **options)


def slower_layer(layer, forward, *arguments, **options):
    time.sleep(0.05)
    return forward(layer, *arguments, **options)


def left_eager(forward, *arguments, **options):
    return forward(*arguments, **options)


def raises(forward, *arguments, **options):
    raise RuntimeError("Failed to find C compiler.\x1b[2J\nand a traceback")


def plant(monkeypatch, fault):
    def compile_wrongly(forward, *, dynamic):
        counters["stats"]["unique_graphs"] = 0

        def compiled(*arguments, **options):
            counters["stats"]["unique_graphs"] += fault is not left_eager
            return fault(forward, *arguments, **options)

        return compiled

    monkeypatch.setattr(torch, "compile", compile_wrongly)


FAULTS = {
    wrong_result: r"wrong results: off by .* of their norm",
    not_a_number: r"wrong results: off by nan of their norm",
    wrong_gradient: r"wrong results: off by .* of their norm",
    slower: "it is not 1.03 times as fast",
    left_eager: r"torch runs all of their code eagerly",
    raises: r"Failed to find C compiler\.\\x1b\[2J$",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_ends_in_eager_with_its_reason(part, fault, tmp_path, monkeypatch):
    plant(monkeypatch, fault)
    hidden = torch.randn(2, 38, 64)

    def run():
        return part(hidden, positions(BATCHES[0]))

    expected = run()
    [chosen] = choose(part, run, tmp_path, "auto")
    assert (chosen.layers, chosen.kernel) == ("LlamaDecoderLayer", "eager")
    assert re.search(FAULTS[fault], chosen.reason)
    assert chosen.slow == (fault is not slower)
    assert torch.equal(run(), expected)


def test_what_must_be_compiled_and_cannot_be_ends_the_run(part, tmp_path, monkeypatch):
    plant(monkeypatch, raises)
    message = r"train.compile: LlamaDecoderLayer cannot be compiled here: Failed to .*doctor"
    with pytest.raises(UserError, match=message):
        choose(part, lambda: part(torch.randn(2, 38, 64), positions(BATCHES[0])), tmp_path)


@pytest.mark.parametrize(("mode", "deterministic"), [("auto", True), (True, False)])
def test_time_decides_nothing_in_a_deterministic_run_or_where_compiling_is_asked_for(
    part, mode, deterministic, tmp_path, monkeypatch
):
    plant(monkeypatch, slower)
    [chosen] = choose(
        part,
        lambda: part(torch.randn(2, 38, 64), positions(BATCHES[0])),
        tmp_path,
        mode,
        deterministic=deterministic,
    )
    assert (chosen.kernel, chosen.factor) == ("compiled", None)
    assert torch._inductor.config.deterministic == deterministic


def test_faster_code_is_used_and_its_gain_measured(part, tmp_path, monkeypatch):
    stock = LlamaDecoderLayer.forward
    monkeypatch.setattr(LlamaDecoderLayer, "forward", functools.partialmethod(slower_layer, stock))
    used = []

    def compile_quickly(forward, *, dynamic):
        def fast(*arguments, **options):
            used.append(1)
            counters["stats"]["unique_graphs"] += 1
            return stock(*arguments, **options)

        return fast

    monkeypatch.setattr(torch, "compile", compile_quickly)
    hidden = torch.randn(2, 38, 64)
    [chosen] = choose(part, lambda: part(hidden, positions(BATCHES[0])), tmp_path, "auto")
    assert chosen.kernel == "compiled" and chosen.factor > 1.03
    used.clear()
    part(hidden, positions(BATCHES[0]))
    assert len(used) == 2


def test_nobody_else_can_put_code_into_the_folder_of_compiled_code(part, tmp_path, monkeypatch):
    plant(monkeypatch, left_eager)
    folder = tmp_path / "cache" / "compiled"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    choose(part, lambda: part(torch.randn(2, 38, 64), positions(BATCHES[0])), folder, "auto")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert torch._inductor.codecache.cache_dir() == str(folder)
    assert torch._inductor.config.compile_threads == torch.get_num_threads()


def test_a_cache_that_cannot_be_written_is_a_reason_to_stay_eager(part, tmp_path):
    file = tmp_path / "file"
    file.touch()
    run = functools.partial(part, torch.randn(2, 38, 64), positions(BATCHES[0]))
    [chosen] = choose(part, run, file / "compiled", "auto")
    assert chosen.kernel == "eager" and "Not a directory" in chosen.reason

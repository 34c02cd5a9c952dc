"""Slices of a stock model: what they hold, open, compute and keep alive."""

import gc
import itertools
import json
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from json_files import read_json, write_json
from processes import ran_python
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from mmtrain.base.errors import UserError
from mmtrain.model.llm.bookends import Bookend
from mmtrain.model.llm.language import DecoderLayers, load_decoder_layers, slice_of
from mmtrain.model.llm.tiny import tiny_model

POSITIONS = torch.cat([torch.arange(13), torch.arange(6), torch.arange(19)])[None]


def make_model(family: str = "llama", **options) -> PreTrainedModel:
    return tiny_model(CONFIG_MAPPING[family](**{"num_hidden_layers": 6, **options}), seed=0)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model()


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def hidden(model) -> torch.Tensor:
    return torch.randn(1, 38, model.config.hidden_size, generator=torch.Generator().manual_seed(0))


def save(model: PreTrainedModel, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


def run(slices, hidden: torch.Tensor) -> torch.Tensor:
    for part in slices:
        hidden = part(hidden, POSITIONS)
    return hidden


@pytest.mark.parametrize(
    "borders", [(0, 6), (0, 0, 6), (0, 6, 6), (0, 0, 1, 5, 6, 6), (0, 1, 2, 3, 4, 5, 6)]
)
def test_any_cut_gives_the_same_bits(model, hidden, borders):
    slices = [
        slice_of(model, a, b, embedding=i == 0, head=i == len(borders) - 2)
        for i, (a, b) in enumerate(itertools.pairwise(borders))
    ]
    whole = slice_of(model, 0, 6, embedding=True, head=True)
    assert torch.equal(run(slices, hidden), run([whole], hidden))


def test_a_front_without_layers_returns_its_input_untouched(model, hidden):
    front = slice_of(model, 0, 0, embedding=True, head=False)
    assert front(hidden, POSITIONS) is hidden
    assert [name for name, _ in front.global_parameters()] == ["llm.embedding.weight"]


def test_a_head_without_layers_is_the_final_norm(model, hidden):
    head = slice_of(model, 6, 6, embedding=False, head=True)
    assert torch.equal(head(hidden, POSITIONS), model.model.norm(hidden))
    assert {name for name, _ in head.global_parameters()} == {"llm.norm.weight", "llm.head.weight"}


@pytest.mark.parametrize("family", ["granite", "gemma2", "cohere2", "gpt2", "opt", "llama4_text"])
def test_logits_carry_the_familys_own_scaling_and_soft_cap(family):
    options = {"granite": {"logits_scaling": 8.0}, "cohere2": {"logit_scale": 0.25}}
    stock = make_model(family, **options.get(family, {}))
    part = slice_of(stock, 6, 6, embedding=False, head=True)
    names = [name for name, _ in part.named_parameters()]
    ids = torch.randint(128, (1, 9), generator=torch.Generator().manual_seed(0))
    hooked = []
    handle = stock.get_output_embeddings().register_forward_pre_hook(
        lambda _, args: hooked.append(args[0])
    )
    expected = stock(ids).logits[0]
    handle.remove()
    assert torch.equal(part.logits(hooked[0][0]), expected)
    # the shell around the head is no submodule
    assert [name for name, _ in part.named_parameters()] == names


@pytest.mark.parametrize(("first", "last"), [(0, 2), (2, 4), (4, 6)])
def test_no_activation_outlives_its_micro_batch(model, hidden, first, last):
    part = slice_of(model, first, last, embedding=first == 0, head=last == 6)
    seen = []

    def remember(module, arguments, output):
        seen.extend(weakref.ref(x) for x in (arguments[0], output))

    for layer in part.model.model.layers[first:last]:
        layer.register_forward_hook(remember)
    given = hidden.clone().requires_grad_()
    output = part(given, POSITIONS)
    del output, given
    gc.collect()
    assert len(seen) == 4
    assert all(reference() is None for reference in seen)


def test_an_error_in_a_layer_leaves_nothing_for_the_next_micro_batch(model, hidden):
    part = slice_of(model, 2, 4, embedding=False, head=False)
    expected = part(hidden, POSITIONS)
    with pytest.raises(RuntimeError):
        part(hidden[..., :-1], POSITIONS)  # a width that does not fit
    bookends = [module for module in part.modules() if isinstance(module, Bookend)]
    assert len(bookends) == 4
    assert all(bookend.hand_in is None and bookend.handed_out is None for bookend in bookends)
    assert torch.equal(part(hidden, POSITIONS), expected)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen3_moe"])
def test_recomputing_layers_changes_neither_output_nor_gradient_nor_names(family, hidden):
    part = slice_of(make_model(family), 1, 5, embedding=False, head=False)
    names = [name for name, _ in part.named_parameters()]
    layers = part.model.model.layers[1:5]
    layers[0].requires_grad_(True)
    calls = [0] * 4
    for i, layer in enumerate(layers):
        layer.input_layernorm.register_forward_hook(
            lambda *_, i=i: calls.__setitem__(i, calls[i] + 1)
        )

    def attempt(count):
        part.recompute(count)
        calls[:] = [0] * 4
        x = hidden.clone().requires_grad_()
        y = part(x, POSITIONS)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layers[0].parameters()])]

    plain = attempt(0)
    for count, expected_calls in ((2, [2, 2, 1, 1]), (4, [2, 2, 2, 2]), (0, [1, 1, 1, 1])):
        assert all(torch.equal(a, b) for a, b in zip(attempt(count), plain, strict=True))
        assert calls == expected_calls and [name for name, _ in part.named_parameters()] == names


def test_a_tied_head_alone_holds_its_own_copy_and_beside_the_embedding_one_matrix(tmp_path, opened):
    stock = make_model(tie_word_embeddings=True)
    path = save(stock, tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    last = load_decoder_layers(path, 4, 6, embedding=False, head=True, dtype=torch.float32)
    assert "model.embed_tokens.weight" in opened
    named = dict(last.global_parameters())
    assert torch.equal(named["llm.head.weight"], stock.lm_head.weight)
    assert "llm.embedding.weight" not in named
    assert last.head_parameters()[0] is named["llm.head.weight"]
    whole = load_decoder_layers(path, 0, 6, embedding=True, head=True, dtype=torch.float32)
    assert "llm.head.weight" not in dict(whole.global_parameters())
    assert whole.head_parameters()[0] is dict(whole.global_parameters())["llm.embedding.weight"]


def hollow_checkpoint(folder: Path, layers: int) -> int:
    """A bf16 llama of zeros that takes no room on the disk, and memory as any other when read;
    bytes of a layer.
    """
    sizes = {"hidden_size": 1024, "num_attention_heads": 8, "intermediate_size": 4096}
    config = LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=1000)
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    header, end = {}, 0
    for name, parameter in model.named_parameters():
        begin, end = end, end + 2 * parameter.numel()
        header[name] = {
            "dtype": "BF16",
            "shape": list(parameter.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)
    return sum(2 * p.numel() for p in model.model.layers[0].parameters())


@pytest.mark.nightly
def test_a_rank_takes_memory_for_its_slice_and_of_streamed_layers_for_one(tmp_path):
    layer = hollow_checkpoint(tmp_path, 8)
    script = """if True:
        import json, sys, threading
        import torch
        import transformers.models.llama.modeling_llama
        from mmtrain.model.llm.language import load_decoder_layers
        from mmtrain.model.weights.streaming import StreamedLayers
        from mmtrain.model.weights.weight_sources import HostSource
        torch.set_num_threads(1)
        def memory(kind):
            with open("/proc/self/status") as lines:
                return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(kind))
        before = memory("VmHWM")
        part = load_decoder_layers(sys.argv[1], 2, 4, embedding=False, head=False, dtype=torch.bfloat16)
        for parameter in part.parameters():
            parameter.sum()
        own = memory("VmHWM") - before
        del part
        before, peak, ended = memory("RssAnon"), 0, threading.Event()
        def watch():
            global peak
            while not ended.wait(0.001):
                peak = max(peak, memory("RssAnon"))
        watching = threading.Thread(target=watch)
        watching.start()
        streamed = StreamedLayers(HostSource(torch.device("cpu")))
        ends = {"embedding": True, "head": True, "dtype": torch.bfloat16}
        part = load_decoder_layers(sys.argv[1], 0, 8, **ends, streamed=streamed, streamed_numbers=range(8))
        ended.set()
        watching.join()
        print(json.dumps([own, peak - before, memory("RssAnon") - before, len(streamed.layers)]))
    """
    done = ran_python("-c", script, tmp_path, check=True)
    (tmp_path / "model.safetensors").unlink()
    own, peak, kept, layers = json.loads(done.stdout.splitlines()[-1])
    assert layers == 8 and layer > 30 * 2**20
    assert own < 1.25 * 2 * layer + 32 * 2**20, (
        f"{own / 2**20:.0f} MiB for 2 layers of {layer / 2**20:.0f}"
    )
    assert peak < 1.25 * layer + 16 * 2**20, (
        f"{peak / 2**20:.0f} MiB for layers of {layer / 2**20:.0f}"
    )
    assert kept < 32 * 2**20, "what is kept is not the process's own"


def test_a_head_that_a_multimodal_class_ties_and_the_llms_own_does_not_is_the_embedding(tmp_path):
    make_model("kimi_linear", num_hidden_layers=2).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    inside = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in stored.items()
    }
    del inside["lm_head.weight"]
    save_file(inside, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = read_json(tmp_path / "config.json")
    whole = {
        "model_type": "lfm2_vl",
        "tie_word_embeddings": True,
        "vision_config": {},
        "text_config": text,
    }
    write_json(tmp_path / "config.json", whole)
    part = load_decoder_layers(str(tmp_path), 0, 2, embedding=True, head=True, dtype=torch.float32)
    assert torch.equal(part.head_parameters()[0], stored["model.embed_tokens.weight"])


def test_checkpoints_saved_without_the_lm_head_load_too(tmp_path):
    """The published gpt2: names without `transformer.`, and buffers that are no parameters any
    more.
    """
    stock = make_model("gpt2")
    stock.save_pretrained(tmp_path)
    tensors = {
        k.removeprefix("transformer."): v
        for k, v in load_file(tmp_path / "model.safetensors").items()
    }
    for layer in range(6):
        tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 8, 8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = dict(stock.named_parameters(remove_duplicate=False))
    for first, last in ((0, 3), (3, 6)):
        ends = {"embedding": first == 0, "head": last == 6}
        part = load_decoder_layers(str(tmp_path), first, last, **ends, dtype=torch.float32)
        for name, parameter in part.model.named_parameters():
            assert torch.equal(parameter, expected[name]), name


def load(path: Path | str) -> DecoderLayers:
    return load_decoder_layers(str(path), 2, 4, embedding=False, head=False, dtype=torch.float32)


def test_weights_that_do_not_fit_are_refused_with_what_to_do(folder, tmp_path):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = read_json(tmp_path / "config.json")
    write_json(tmp_path / "config.json", config | {"intermediate_size": 56})
    with pytest.raises(UserError, match=r"do not fit config\.json.*mismatched_keys"):
        load(tmp_path)
    without = {key: value for key, value in config.items() if key != "num_hidden_layers"}
    write_json(tmp_path / "config.json", without)
    with pytest.raises(
        UserError, match="transformers builds 32 decoder layers, but the weights have"
    ):
        load(tmp_path)
    write_json(tmp_path / "config.json", config)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"missing_keys.*layers\.3\.mlp\.up_proj\.weight"):
        load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match="Download the weights"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba2"}, "mamba2 cannot be staged and packed: its recurrent layers"),
        ({"model_type": "llama99"}, "does not know llama99. A later version may"),
        (
            {"model_type": "yi99", "auto_map": {"AutoModel": "m.M"}},
            "does not know yi99. auto_map .* ends in -hf",
        ),
        ({"model_type": "siglip_vision_model"}, "siglip_vision_model has no causal LM"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
    ],
    ids=lambda value: value.get("model_type", "quantised") if isinstance(value, dict) else "",
)
def test_models_that_cannot_be_sliced_are_refused_by_name(folder, tmp_path, change, message):
    config = read_json(folder / "config.json") | change
    write_json(tmp_path / "config.json", config)
    with pytest.raises(UserError, match=message):
        load(tmp_path)


def test_options_in_config_json_that_would_keep_activations_are_switched_off(model, hidden):
    asking = make_model(output_hidden_states=True, use_cache=True)
    part = slice_of(asking, 2, 4, embedding=False, head=False)
    assert not part.model.config.output_hidden_states
    assert not part.model.config.use_cache
    assert torch.equal(
        part(hidden, POSITIONS),
        slice_of(model, 2, 4, embedding=False, head=False)(hidden, POSITIONS),
    )


def test_llama4_and_its_like_load_although_their_base_model_is_named_otherwise(tmp_path):
    stock = make_model("llama4_text")
    path = save(stock, tmp_path)
    part = load_decoder_layers(path, 3, 6, embedding=False, head=True, dtype=torch.float32)
    for name, parameter in part.model.named_parameters():
        assert torch.equal(parameter, stock.get_parameter(name)), name

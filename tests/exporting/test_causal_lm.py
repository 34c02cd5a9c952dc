"""A run on text alone leaves as a plain causal LM, which stock transformers loads and asks as the run was trained."""

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from untrained_runs import config_of, export, make_checkpoint, weights

from mmtrain.facts.families import canonical_name

TEXT = ("model.vision=null", "data.template=llava_v1", "model.llm.dtype=float32")
TRAINED = "model.trainable=[llm.layers.7, llm.head]"


def trained(folder, names):
    """Other values for some of a folder's tensors, by global name."""
    generator = torch.Generator().manual_seed(3)
    own = {canonical_name(name): tensor for name, tensor in weights(folder).items()}
    return {n: torch.randn(t.shape, generator=generator) * 0.1 for n, t in own.items() if n.startswith(names)}


def test_the_llms_own_class_loads_it_with_what_was_trained(tiny, tmp_path):
    others = trained(tiny / "llm", ("llm.layers.7.", "llm.head."))
    checkpoint = make_checkpoint(tmp_path / "run", config_of(tiny, *TEXT, TRAINED), others)
    export(checkpoint, tmp_path / "out")
    published, written = weights(tiny / "llm"), weights(tmp_path / "out")
    assert set(written) == set(published)
    for name, tensor in written.items():
        assert torch.equal(tensor, others.get(canonical_name(name), published[name])), name
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report.values())
    stock = AutoModelForCausalLM.from_pretrained(tiny / "llm")
    for name, parameter in stock.named_parameters():
        if (own := others.get(canonical_name(name))) is not None:
            parameter.data.copy_(own)
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, stock(ids).logits, rtol=1e-5, atol=1e-5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    asked = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Where?"}], tokenize=False, add_generation_prompt=True
    )
    assert asked.endswith("USER: Where? ASSISTANT:")
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id]
    assert "AutoModelForCausalLM" in (tmp_path / "out" / "README.md").read_text()

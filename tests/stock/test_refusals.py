"""The plan refuses, by one function for both, every run that an export refuses from facts that a
plan has.
"""

from __future__ import annotations

import ast
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from json_files import read_json
from sweeps import sweep
from untrained_runs import config_of, export, make_checkpoint, make_tower

import mmtrain
from mmtrain.base.errors import UserError
from mmtrain.plan.planner import make_plan

NORMED = ("model.vision.final_norm=true", "model.vision.select_layer=-1", "data.image_fit=resize")
IDEFICS3 = ("model.projector.type=shuffle_linear", "model.vision.layout=idefics3", *NORMED)
PERCEPTION = ("model.projector.type=mlp2x_gelu_pool", *NORMED)

PLAN = "the plan asks the same function"
FILES = "the run itself reads what is missing, or `llm_shape` and `vision_shape` refuse it"
MODULES = "modules of timm tell, which a plan does not import"
LOADER = "transformers' loader or tokenizer tells, which a plan does not import"
PEFT = "peft tells, which a plan does not import"
CHANGED = "the files, the checkpoint or the installed version are others than those of the run"
VALUES = "values of weights tell"
OUT = "the folder that is written, or the data that --verify reads"
WHY = {
    "exporters.exporter_for": (2, PLAN),
    "exporters.refuse_llava_code": (4, PLAN),
    "exporters._refuse_without_adapters": (1, PLAN),
    "exporters._refuse_more_than_adapters": (
        3,
        f"{PLAN}; --base llm is chosen when it is exported",
    ),
    "exporters._refuse_unknown_class": (1, PLAN),
    "exporters.refuse_unfit_format": (1, PLAN),
    "exporters.check_export_format": (1, PLAN),
    "stock_class.language_name": (1, f"{PLAN}: the head's bias, in `_unfit_llm`"),
    "stock_class._stock": (1, LOADER),
    "hf._refuse_replaced_weights": (1, CHANGED),
    "hf.refuse_loading_faults": (2, LOADER),
    "hf.refuse_unfit_family": (
        1,
        f"{LOADER}; scales, caps, a head's bias and embeddings elsewhere: {PLAN}",
    ),
    "language.language_for_export": (1, CHANGED),
    "language.take_merged": (1, CHANGED),
    "peft_folder._places": (2, PEFT),
    "peft_folder.load_adapters": (1, PEFT),
    "processor._tokenizer_for_prompts": (1, LOADER),
    "processor.write_tokenizer": (1, LOADER),
    "processor.check_processor": (1, LOADER),
    "tensors.stored": (1, f"{FILES}: only buffers may have another type"),
    "tensors.read": (1, VALUES),
    "tensors.new_folder": (3, OUT),
    "tensors.require_space": (1, OUT),
    "verify._stock_model": (1, LOADER),
    "verify.read_samples": (1, OUT),
    "vision._from_transformers": (3, f"{FILES}; registers: {PLAN}"),
    "vision._from_timm": (4, f"{PLAN}; epsilons: {MODULES}"),
    "vision._refuse_unknown_modules": (3, MODULES),
    "vision.wrapped_timm_encoder": (1, MODULES),
    "vision.merged_encoder": (1, CHANGED),
    "vision._with_trained": (1, CHANGED),
}
"""Refusals by the function that raises them: their number, and who else knows."""


def refusals(file: Path) -> Counter[str]:
    """Count the errors for users that each function of a file raises."""
    found: Counter[str] = Counter()

    def visit(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Raise) and isinstance(child.exc, ast.Call):
                found[f"{file.stem}.{name}"] += ast.unparse(child.exc.func) in (
                    "UserError",
                    "_unfit",
                )
            visit(child, child.name if isinstance(child, ast.FunctionDef) else name)

    visit(ast.parse(file.read_text("utf-8")), "")
    return found


def test_every_refusal_of_an_exporter_is_the_plans_or_has_a_reason():
    package = Path(mmtrain.__file__).parent
    stock = [package / "stock" / f"{name}.py" for name in ("exporters", "stock_class")]
    found = sum(map(refusals, [*(package / "exporting").glob("*.py"), *stock]), Counter())
    del found["stock_class.keys"]  # of a folder that a run begins with
    assert +found == Counter({name: count for name, (count, _) in WHY.items()})


def tower(architecture: str, changes: dict, **settings: object) -> Callable[[Path, Path], str]:
    """Make an encoder's folder, with other settings of its images; returns the key that names
    it.
    """

    def made(tiny: Path, folder: Path) -> str:
        file = make_tower(folder, architecture, changes) / "config.json"
        content = read_json(file)
        content["pretrained_cfg"] |= settings
        file.write_text(json.dumps(content))
        return f"model.vision.name={folder}"

    return made


def other_file(name: str, content: str | None) -> Callable[[Path, Path], str]:
    """Copy the LLM's folder with another file, or with a link out of it; returns the key that names
    it.
    """

    def made(tiny: Path, folder: Path) -> str:
        shutil.copytree(tiny / "llm", folder)
        if content is None:
            (folder / name).unlink()
            (folder / name).symlink_to(tiny / "llm" / name)
        else:
            (folder / name).write_text(content)
        return f"model.llm.path={folder}"

    return made


SIGLIP = "vit_base_patch16_siglip_224"
CASES = {
    "no last norm": (
        tower("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg"}),
        IDEFICS3,
        "has no final norm (model.vision.final_norm), unlike every stock encoder",
    ),
    "half an MLP": (
        tower("vit_tiny_patch16_224", {"mlp_ratio": 2.5}),
        (),
        "has MLPs of 80 in blocks of 32, which is not a whole multiple, unlike every stock encoder",
    ),
    "black mean": (
        tower(SIGLIP, {}, mean=[0.0, 0.0, 0.0]),
        IDEFICS3,
        "would be all zeros, which Idefics3ForConditionalGeneration reads as no image",
    ),
    "lanczos": (
        tower(SIGLIP, {}, interpolation="lanczos"),
        PERCEPTION,
        "resizes by lanczos, which torchvision",
    ),
    "link": (
        other_file("tokenizer.json", None),
        (),
        "outside its folder, and an export would publish that file",
    ),
    "generation": (
        other_file("generation_config.json", '{"pad_token_id": "x"}'),
        (),
        "generation_config.json says pad_token_id 'x', which no model has",
    ),
}


def test_a_filter_that_torchvision_lacks_is_refused_for_it_alone(tiny, tmp_path):
    name = tower(SIGLIP, {}, interpolation="lanczos")(tiny, tmp_path / "vision")
    config = config_of(tiny, name, "parallel.pipeline=1")
    make_plan(config)
    said = r"^data\.resize: torchvision, but .* by lanczos, .*\. Set data\.resize=pillow$"
    with pytest.raises(UserError, match=said):
        make_plan(config.changed({"data.resize": "torchvision"}))


@pytest.mark.parametrize("case", sweep(CASES, ("half an MLP", "link", "generation")))
def test_plan_and_export_refuse_alike(tiny, tmp_path, case):
    make, keys, said = CASES[case]
    config = config_of(tiny, make(tiny, tmp_path / "folder"), "parallel.pipeline=1", *keys)
    with pytest.raises(UserError) as planned:
        make_plan(config.changed({"export.format": "hf"}))
    with pytest.raises(UserError) as exported:
        export(make_checkpoint(tmp_path / "run", config), tmp_path / "out")
    why = (
        str(planned.value)
        .removeprefix("export.format=hf: ")
        .removesuffix(". Change that, or set export.format=safetensors")
    )
    assert said in why and why in str(exported.value)

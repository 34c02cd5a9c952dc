"""What other programs of the field call things, and what is set here instead.

For who brings a configuration, a script or a habit of transformers' Trainer, LLaVA, LLaMA-Factory, ms-swift, DeepSpeed,
Megatron or axolotl. The table of configs/README.md is this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmtrain.config.keys import Path

# Names, and a sentence that goes on after "here".
ANSWERS = {
    "batch_size train_batch_size global_batch_size total_batch_size effective_batch_size": (
        "train.packs_per_step is the batch of a step over all replicas, counted in packs of data.pack_length tokens"
    ),
    "per_device_train_batch_size per_gpu_train_batch_size micro_batch_size train_micro_batch_size_per_gpu": (
        "train.packs_per_microbatch is what one forward handles, in packs of data.pack_length tokens, and "
        "train.packs_per_step the batch"
    ),
    "gradient_accumulation_steps accumulate_grad_batches": (
        "train.packs_per_step / (parallel.data x train.packs_per_microbatch) micro-batches make a step: leave it out"
    ),
    "per_device_eval_batch_size eval_batch_size": (
        "evaluations take train.packs_per_microbatch packs at a time, as training does"
    ),
    "num_train_epochs num_epochs max_epochs train_epochs": "it is train.epochs",
    "max_steps train_iters max_iters total_steps num_steps num_training_steps": "it is train.max_steps",
    "learning_rate": "it is optimizer.lr",
    "mm_projector_lr mm_vision_tower_lr vision_tower_lr vit_lr aligner_lr": (
        "optimizer.groups gives parts rates of their own"
    ),
    "lr_scheduler_type lr_scheduler lr_schedule lr_decay_style scheduler": "it is optimizer.schedule",
    "warmup_ratio warmup_steps num_warmup_steps lr_warmup_fraction lr_warmup_iters lr_warmup_steps": (
        "optimizer.warmup_fraction is a share of the steps"
    ),
    "weight_decay": "it is optimizer.weight_decay",
    "min_lr lr_end": "optimizer.min_lr_fraction is a share of optimizer.lr",
    "max_grad_norm gradient_clipping clip_grad grad_clip gradient_clip_val": "it is optimizer.clip_norm",
    "adam_beta1 adam_beta2 adam_betas": "they are optimizer.betas",
    "adam_epsilon adam_eps": "it is optimizer.eps",
    "optim optimizer_type optimizer_name optimizer_params": (
        "the optimizer is AdamW, set by optimizer.lr, optimizer.betas, optimizer.eps and optimizer.weight_decay"
    ),
    "report_to wandb use_wandb wandb_project": (
        "run.report_to names trackers; the project of Weights & Biases is its own variable, WANDB_PROJECT"
    ),
    "logging_dir tensorboard_dir": "trackers write into the run's folder, below run.dir",
    "logging_steps log_interval logging_strategy logging_first_step steps_per_print plot_loss": (
        "every step is written to metrics.jsonl; run.report_to names trackers that get them too"
    ),
    "save_steps save_interval save_strategy": "checkpoint.every_steps and checkpoint.every_minutes say when to save",
    "save_total_limit": "it is checkpoint.keep_last",
    "load_best_model_at_end metric_for_best_model": "checkpoint.keep_best keeps the best one, too",
    "async_save": "every checkpoint is written in the background",
    "eval_steps eval_interval evaluation_strategy eval_strategy": "it is eval.every_steps",
    "eval_dataset val_dataset validation_file": "it is eval.shards",
    "val_size val_set_size split_dataset_ratio": "it is eval.fraction",
    "do_train do_eval do_predict eval_on_start": (
        "mmtrain train trains, and evaluates before, between and after where eval.shards or eval.fraction is set"
    ),
    "deepspeed zero_stage zero_optimization fsdp fsdp_config offload optimizer_cpu_offload": (
        "models are cut into parallel.pipeline stages and repeated parallel.data times, whatever does not train holds "
        "no optimizer state, and frozen layers may be kept in host memory or in parts on replicas: "
        "parallel.streamed_layers, parallel.stream_from"
    ),
    "pipeline_model_parallel_size pipeline_parallel_size num_stages parallel_stage parallel_stages": (
        "it is parallel.pipeline"
    ),
    "virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage": "it is parallel.stages_per_rank",
    "decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers pipeline_model_parallel_layout": (
        "parallel.boundaries says where stages begin"
    ),
    "data_parallel_size": "it is parallel.data",
    "tensor_model_parallel_size tensor_parallel_size context_parallel_size sequence_parallel sequence_parallel_size": (
        "there is pipeline and data parallelism alone: parallel.pipeline, parallel.data"
    ),
    "num_processes nproc_per_node num_gpus gpus n_gpu devices world_size": (
        "ranks are parallel.pipeline x parallel.data"
    ),
    "nnodes num_nodes num_machines machine_rank node_rank": (
        "machines are named on the command line: --nnodes, --node-rank, --rdzv-endpoint"
    ),
    "ddp_timeout distributed_timeout_minutes": "it is parallel.timeout_seconds",
    "fp16 bf16 tf32 torch_dtype mixed_precision precision compute_dtype pure_bf16": (
        "model.llm.dtype and model.vision.dtype are bfloat16 or float32, and what trains has float32 masters"
    ),
    "quantization_bit quantization_method load_in_4bit load_in_8bit quant_method quant_bits bits": (
        "model.llm.quantize keeps frozen decoder layers in 4 or 8 bits: nf4, int8"
    ),
    "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing recompute_granularity "
    "recompute_num_layers": "parallel.recompute_layers says how many layers recompute, and auto what memory needs",
    "flash_attn attn_implementation attn_impl use_flash_attn use_flash_attention_2 attention_backend": (
        "attention is chosen by what the device has, and there is no such key"
    ),
    "dataloader_num_workers num_workers preprocessing_num_workers dataset_num_proc": "it is data.workers",
    "output_dir save_dir": "results go to run.dir/run.name",
    "run_name wandb_exp_name": "it is run.name",
    "overwrite_output_dir": "it is run.overwrite",
    "model_name_or_path model_path base_model pretrained_model_name_or_path model_id": (
        "model.llm.path names the LLM, and model.pretrained a whole multimodal model"
    ),
    "tokenizer tokenizer_name tokenizer_name_or_path tokenizer_model": "the tokenizer is that of model.llm.path",
    "trust_remote_code": "no code of a model's folder is ever run",
    "vision_tower vision_model mm_vision_tower": "it is model.vision.name",
    "mm_projector_type": "it is model.projector.type",
    "mm_vision_select_layer": "it is model.vision.select_layer",
    "mm_vision_select_feature": "the patches are taken, never the class token, from model.vision.select_layer",
    "image_aspect_ratio vision_aspect_ratio": (
        "model.vision.layout is square, anyres or anyres_max_9, and of a square data.image_fit says pad, resize or "
        "center_crop"
    ),
    "mm_patch_merge_type mm_newline_position": (
        "model.vision.layout anyres and anyres_max_9 merge as spatial_unpad does, a trained newline behind each line"
    ),
    "image_grid_pinpoints": "it is model.vision.pinpoints, as (height, width) in pixels",
    "max_dynamic_patch max_patches max_num_tiles": "it is model.vision.max_tiles, the tile of the whole not counted",
    "min_dynamic_patch min_patches": "a grid has one tile or more, and model.vision.max_tiles bounds it",
    "dynamic_image_size crop_to_patches use_thumbnail": (
        "model.vision.layout tiles cuts an image into up to model.vision.max_tiles squares and adds one of the whole"
    ),
    "max_pixels image_max_pixels min_pixels image_min_pixels image_resolution": (
        "a picture becomes squares of the encoder's size, as many as model.vision.layout says; data.max_image_pixels "
        "bounds what is read"
    ),
    "image_crop_resolution image_split_resolution force_image_size": (
        "tiles have the size of the square that the encoder of model.vision.name was trained on"
    ),
    "tune_mm_mlp_adapter freeze_mm_mlp_adapter freeze_backbone freeze_vision_tower freeze_multi_modal_projector "
    "freeze_language_model freeze_llm freeze_vit freeze_aligner mm_tunable_parts unfreeze_mm_vision_tower "
    "trainable_parameters freeze_parameters freeze_trainable_layers": (
        "model.trainable names what trains, and all else is frozen"
    ),
    "stage finetuning_type train_type tuner_type": (
        "model.trainable names what trains and model.lora adds adapters; training is supervised, without DPO or PPO"
    ),
    "pretrain_mm_mlp_adapter": "it is model.projector.init_from",
    "lora_enable use_lora use_peft adapter": "model.lora adds adapters, and model.trainable names them",
    "lora_r lora_rank": "it is model.lora.r",
    "lora_alpha": "it is model.lora.alpha",
    "lora_dropout": "there is none: layers that recompute would draw another mask than the first time",
    "lora_target lora_targets target_modules lora_target_modules": "it is model.lora.targets",
    "modules_to_save additional_target": "model.trainable names layers that train whole beside model.lora",
    "adapter_name_or_path adapters": "model.init_from begins with all that another run of mmtrain has trained",
    "cutoff_len model_max_length max_seq_length max_length max_seq_len seq_length sequence_len block_size": (
        "data.pack_length is what a pack holds, and a longer sample is left out"
    ),
    "packing neat_packing sample_packing group_by_length group_by_modality_length": (
        "samples always share packs of data.pack_length tokens, without seeing each other"
    ),
    "dataset datasets data_path dataset_dir train_file train_data image_folder image_dir media_dir": (
        "data.shards names webdataset tars, which mmtrain shard makes of other files; several data sets: data.sets"
    ),
    "interleave_probs mix_strategy interleave_prob": "data.sets gives each set a weight",
    "template version conv_version prompt_version chat_template": "it is data.template",
    "train_on_prompt mask_history": "answers are supervised and prompts are not, as data.template says",
    "streaming lazy_preprocess lazy_tokenize": "samples are always read when they are needed",
    "shuffle shuffle_buffer_size buffer_size dataset_shuffle": (
        "every epoch has an order of its own, by run.seed; data.shuffle_shards says how far samples mix"
    ),
    "max_samples max_train_samples": "all of data.shards is used; train.max_steps ends a run sooner",
    "max_eval_samples": "it is eval.max_samples",
    "seed data_seed": "it is run.seed",
    "full_determinism deterministic_mode": "it is train.deterministic",
    "resume_from_checkpoint": "the same command goes on by itself; --resume names another checkpoint",
    "push_to_hub hub_model_id": "nothing is uploaded; mmtrain export writes a folder",
}
_ANSWER_OF = {name: answer for names, answer in ANSWERS.items() for name in names.split()}

# Keys by which a whole file is known for what it is.
_PROGRAMS = {
    "DeepSpeed": "zero_optimization train_micro_batch_size_per_gpu gradient_clipping steps_per_print train_batch_size",
    "accelerate": "compute_environment distributed_type num_machines num_processes main_training_function",
    "axolotl": "base_model sequence_len val_set_size sample_packing micro_batch_size",
    "LLaMA-Factory": "finetuning_type cutoff_len stage do_train dataset_dir lora_target plot_loss",
    "ms-swift": "tuner_type train_type split_dataset_ratio freeze_vit freeze_aligner torch_dtype",
}


def answer_to(path: Path) -> str | None:
    """What is set here instead of a key that other programs know by this name, wherever it stands: after "here"."""
    names = [name.lstrip("-").replace("-", "_").lower() for name in path]
    return _ANSWER_OF.get("_".join(names[-2:])) or _ANSWER_OF.get(names[-1])  # eval: {batch_size: 4}, then batch_size


def whole_file_of(content: Mapping[str, Any]) -> str | None:
    """Of which program the content of a file is a configuration, and by which keys; None where it may be mmtrain's."""
    if any(isinstance(content.get(section), dict) for section in ("run", "data", "train")):
        return None
    marks = {program: [name for name in names.split() if name in content] for program, names in _PROGRAMS.items()}
    program = max(marks, key=lambda one: len(marks[one]))
    found = [name for name in content if name in _ANSWER_OF]
    if len(marks[program]) < 2:
        program, marks[program] = "another program", found
    if len(marks[program]) < 2:
        return None
    return f"{program} ({', '.join(marks[program][:3])})"

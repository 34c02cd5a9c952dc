"""What a plan uses of DeepSpeed's pipeline engine, and what it refuses: the only module that imports DeepSpeed.

DeepSpeed gives the topology, the data-parallel grid with its process groups, and the optimizer plumbing. Its schedule,
messages, loss and gradient arithmetic break on frozen stages (no optimizer for an empty list, backward without a graph,
clipping without parameters, a mean of micro-batch means), and its checkpoints hold every frozen weight.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.engine import PipelineEngine

from mmtrain.config.schema import RunConfig
from mmtrain.engine.optimizer import make_optimizer
from mmtrain.model.stage import Stage
from mmtrain.plan.plan import Plan

# DeepSpeed's public methods that would bypass a plan.
REFUSED = (
    "train_batch", "eval_batch", "forward", "backward", "step", "scale", "allreduce_gradients", "clip_fp32_gradients",
    "no_sync", "coalesce_grad_reduction", "set_gradient_accumulation_boundary", "set_dataloader", "set_dataiterator",
    "set_batch_fn", "deepspeed_io", "set_data_post_process_func", "save_checkpoint", "save_16bit_model",
    "save_fp16_model", "module_state_dict", "load_checkpoint", "load_module_state_dict", "load_moe_state_dict",
    "set_train_batch_size", "set_train_micro_batch_size", "set_custom_curriculum_learning_schedule", "train", "compile",
    "offload_states", "reload_states",
)  # fmt: skip


class _RankStages(nn.Module):
    """All stages of one rank, by number: DeepSpeed's partitioner sees one layer a rank and has nothing to decide."""

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({str(number): stage for number, stage in stages.items()})


class DeepSpeedPipeline(PipelineEngine):
    """DeepSpeed's engine around one rank's stages; what would bypass the plan raises NotImplementedError."""

    def __init__(
        self, config: RunConfig, plan: Plan, stages: Mapping[int, Stage], trainable: Mapping[str, nn.Parameter]
    ) -> None:
        # On a CPU DeepSpeed would compile a shared-memory op (26-43 s) and fails when ninja is not on PATH. Through
        # vars(): reading the attribute makes DeepSpeed try every op it could compile.
        vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(verbose=False)  # takes the default group as it is
        module = PipelineModule(
            [LayerSpec(_RankStages, stages)] * plan.pipeline, num_stages=plan.pipeline, partition_method="uniform"
        )
        module.eval()
        settings = {
            "train_micro_batch_size_per_gpu": config.train.packs_per_microbatch,
            "gradient_accumulation_steps": plan.microbatches_per_step,
            "gradient_clipping": 0.0,  # the default, 1.0, is an IndexError on a rank without trainable parameters
            "steps_per_print": None,
        }
        super().__init__(
            args=None,
            model=module,
            optimizer=make_optimizer(module, trainable, config.optimizer),
            config=settings,
            config_class=DeepSpeedConfig(settings, module.mpu()),
            mpu=module.mpu(),
            dist_init_required=False,
        )

    def _broadcast_model(self) -> None:
        """Nothing to broadcast: replicas read the same files and draw the same projector (the audit compares them).

        DeepSpeed would send every frozen weight over the network.
        """


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: DeepSpeedPipeline, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(
            f"DeepSpeed's `{name}` would bypass the plan; `train_step` and `evaluate` run it, `load_trained` and "
            "mmtrain.checkpoint.write.Checkpointer load and save what trains, the configuration says all else "
            "(batches: train.packs_per_step and train.packs_per_microbatch)"
        )

    return refuse


for _name in REFUSED:
    setattr(DeepSpeedPipeline, _name, _refusal(_name))

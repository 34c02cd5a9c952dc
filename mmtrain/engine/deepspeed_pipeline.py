"""Make the DeepSpeed engine that a rank uses: the only module that imports DeepSpeed.

DeepSpeed gives the topology, the data-parallel grid with its process groups, and the optimizer
plumbing. Its schedule, messages, loss and gradient arithmetic break on frozen stages (no optimizer
for an empty list, backward without a graph, clipping without parameters, a mean of micro-batch
means), and its checkpoints hold every frozen weight.
"""

import os
from collections.abc import Mapping

import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.pipe.engine import PipelineEngine

from mmtrain.model.stage import Stage
from mmtrain.plan.plan import Plan


class _Pipeline(PipelineEngine):
    """DeepSpeed's engine without its broadcast of the model, which would send every frozen weight
    over the network.
    """

    def _broadcast_model(self) -> None:
        """Send nothing: replicas read the same files and draw the same projector (the audit
        compares them).
        """


def deepspeed_engine(
    packs_per_microbatch: int,
    plan: Plan,
    stages: Mapping[int, Stage],
    optimizer: torch.optim.Optimizer,
) -> PipelineEngine:
    """Return DeepSpeed's engine around one rank's stages. Collective: call it on every rank."""
    # On a CPU DeepSpeed would compile a shared-memory op (26-43 s) and fails when ninja is not on
    # PATH. Through vars(): reading the attribute makes DeepSpeed try every op it could compile.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)  # takes the default group as it is
    # DeepSpeed's partitioner sees one layer a rank and has nothing to decide.
    layer = LayerSpec(nn.ModuleDict, {str(number): stage for number, stage in stages.items()})
    module = PipelineModule(
        [layer] * plan.pipeline,
        num_stages=plan.pipeline,
        partition_method="uniform",
    )
    module.eval()
    settings = {
        "train_micro_batch_size_per_gpu": packs_per_microbatch,
        "gradient_accumulation_steps": plan.microbatches_per_step,
        # the default, 1.0, is an IndexError on a rank without trainable parameters
        "gradient_clipping": 0.0,
        "steps_per_print": None,
    }
    return _Pipeline(
        args=None,
        model=module,
        optimizer=optimizer,
        config=settings,
        config_class=DeepSpeedConfig(settings, module.mpu()),
        mpu=module.mpu(),
        dist_init_required=False,
    )

"""From shards to one replica's micro-batches. The life of a sample:

1. order    `epoch_samples`: shards permuted by (seed, epoch), read one after another through webdataset, samples
            permuted inside windows of consecutive ones
2. text     `read_sample`, the template: turns -> input_ids and labels, image bytes untouched
3. pack     `pack_documents`: first-fit, in order -> one global list of packs, the same for any number of replicas and
            workers
4. share    step s takes packs [s*G, (s+1)*G); replica r the r-th contiguous part of them
5. images   `make_batch`: only this replica's images are decoded
6. ahead    with workers, steps 1-5 run in other processes, each making every n-th micro-batch

Price: every worker of every replica reads and tokenizes all shards, because lengths are only known by reading.
"""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mmtrain.config import RunConfig
from mmtrain.data.images import image_transform
from mmtrain.data.samples import Pack, PackedBatch, Sample, make_batch, pack_documents, read_sample
from mmtrain.data.shard_list import expand_shards
from mmtrain.data.shards import read_members
from mmtrain.data.templates import TEMPLATES
from mmtrain.errors import UserError
from mmtrain.plan.shapes import llm_shape, model_folder, vision_shape
from mmtrain.rank import die_with_parent

SHUFFLE_WINDOW = 512  # samples, held in memory with their images' bytes
PREFETCH = 2  # micro-batches that each worker makes ahead


class PackedBatches:
    """One replica's micro-batches, for ever: epochs follow each other, and a step may span two of them.

    Every iteration starts again at step 0.
    """

    def __init__(self, config: RunConfig, replica: int, replicas: int) -> None:
        """Open tokenizer and shard list; raises UserError for what is missing."""
        assert 0 <= replica < replicas, f"replica {replica} of {replicas}"
        self.config = config
        self.replica = replica
        self.replicas = replicas
        self.shards = expand_shards(config.data.shards)
        self.tokenizer = load_tokenizer(config.model.llm.path)
        vision = config.model.vision
        self.template = TEMPLATES[config.data.template](
            self.tokenizer,
            vision_shape(vision.name, vision.select_layer).tokens_per_image,
            llm_shape(config.model.llm.path).vocab_size,
        )
        self.transform = image_transform(vision.name)
        eos = self.tokenizer.eos_token_id
        self.padding_id = 0 if eos is None else eos  # any row of the embedding does: nothing looks at padding

    def __iter__(self) -> Iterator[PackedBatch]:
        workers = self.config.data.workers
        if workers == 0:
            batches: Iterable[PackedBatch | UserError] = self._share(0, 1)
        else:
            batches = DataLoader(
                _Worker(self),
                batch_size=None,
                num_workers=workers,
                prefetch_factor=PREFETCH,
                multiprocessing_context="fork",  # torch is imported already; spawn would import it again, seconds each
                worker_init_fn=functools.partial(_live_with_parent, os.getpid()),
            )
        for batch in batches:
            if isinstance(batch, UserError):
                raise batch
            yield batch

    def packs(self) -> Iterator[Pack]:
        """The global list of packs, for ever: a function of the configuration alone."""
        data = self.config.data
        for epoch in itertools.count():
            samples = epoch_samples(self.shards, self.config.run.seed, epoch)
            documents = (self.template(sample) for sample in samples)
            empty = True
            for members in pack_documents(documents, data.pack_length, data.overlong):
                empty = False
                yield replace(members, epoch=epoch)
            if empty:
                raise UserError(
                    f"data.shards: no sample in {len(self.shards)} shards fits into a pack: they are empty, or every "
                    f"sample is longer than data.pack_length={data.pack_length} tokens"
                )

    def _share(self, worker: int, workers: int) -> Iterator[PackedBatch]:
        """Every `workers`-th micro-batch of this replica, from the `worker`-th on."""
        train, packs = self.config.train, self.packs()
        mine = train.packs_per_step // self.replicas
        numbers = itertools.count()
        while True:
            step = list(itertools.islice(packs, train.packs_per_step))
            share = step[self.replica * mine : (self.replica + 1) * mine]
            for first in range(0, mine, train.packs_per_microbatch):
                if next(numbers) % workers == worker:
                    members = share[first : first + train.packs_per_microbatch]
                    yield make_batch(members, self.config.data.pack_length, self.padding_id, self.transform)


def epoch_samples(shards: tuple[Path, ...], seed: int, epoch: int) -> Iterator[Sample]:
    """Every sample once, in an order that is a function of (shards, seed, epoch)."""
    draw = random.Random(f"data order {seed} {epoch}")
    shuffled = draw.sample(shards, len(shards))
    samples = (read_sample(members) for shard in shuffled for members in read_members(shard))
    while window := list(itertools.islice(samples, SHUFFLE_WINDOW)):
        draw.shuffle(window)
        yield from window


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer in an LLM's folder; raises UserError where there is none."""
    folder = model_folder(path)
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise UserError(f"model.llm.path: no tokenizer in {folder} ({str(error).splitlines()[0]})") from error


class _Worker(IterableDataset):
    """A worker process's part of the stream; what the user can mend travels as a value, with its message unchanged."""

    def __init__(self, batches: PackedBatches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[PackedBatch | UserError]:
        worker = get_worker_info()
        try:
            yield from self.batches._share(worker.id, worker.num_workers)
        except UserError as error:
            yield error


def _live_with_parent(parent: int, worker: int) -> None:
    """Let a worker end when its rank does, however that ends.

    A worker outliving a killed rank would hold the rank's sockets open, and its peers would wait instead of failing;
    torch's own watch takes up to 5 s. Ctrl-C reaches the whole process group: the rank alone answers it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)

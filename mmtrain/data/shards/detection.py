"""Detect a data set's format by its first samples.

shards --headers, and texts of the first SEEN samples-->
    samples that each format reads --> SampleFormat
"""

import itertools
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mmtrain.base.errors import UserError
from mmtrain.base.printing import escape, first_few
from mmtrain.config.schema import SampleFormatName
from mmtrain.data.samples.formats import (
    IMAGE_KEYS,
    QUESTION_KEYS,
    READERS,
    SEEN,
    TEXT_SUFFIXES,
    SampleFormat,
    best,
    candidates,
    first_value,
    json_record,
    text_suffix,
)
from mmtrain.data.samples.records import MAX_RECORD_BYTES, BadSample, objects_in
from mmtrain.data.samples.sample import read_sample
from mmtrain.data.shards.archive import read_headers, sample_name
from mmtrain.data.shards.remote import Tar
from mmtrain.data.shards.shard_list import refuse_empty_shards

_log = logging.getLogger(__name__)
AUTO: SampleFormatName = "auto"

_Members = dict[str, bytes]  # of a sample, by suffix; contents of texts alone


def sample_format(asked: SampleFormat, shards: Sequence[Tar], key: str) -> SampleFormat:
    """Return the format that is asked for; for `auto` the best one on the first samples, logged.

    `key` is the configuration's name for the shards. Raises UserError where no format reads any
    sample.
    """
    if asked.name != AUTO:
        return asked
    first = _first_samples(shards, key)
    records = objects_in(map(json_record, first))
    forms = [replace(asked, name=name) for name in candidates(records)]
    faults = []
    for form in forms:
        of_form = []
        for members in first:
            try:
                read_sample("", "", members, form=form)
            except BadSample as error:
                of_form.append(error)
        faults.append(of_form)
    counts = [len(first) - len(of_form) for of_form in faults]
    choice = best(counts, len(first))
    form = forms[choice]
    readable = counts[choice]
    if not readable:
        _refuse_scattered(shards[0])
        lines = [
            f"{key}: none of the first {len(first)} samples of {shards[0]} "
            "can be read in a known format:"
        ]
        for form, of_form in zip(forms, faults, strict=True):
            lines.append(f"{form.name}: {_most_frequent(of_form)}")
        lines.append(
            "Captions under another key of KEY.json need data.caption_key; "
            "mmtrain shard makes shards of other data"
        )
        raise UserError("\n  ".join(lines))

    suffixes = Counter(text_suffix(form.reading, members) for members in first)
    suffix, _ = suffixes.most_common(1)[0]
    more = ""
    if form.name not in ("caption", "llava"):  # they may have any other keys
        read = {"id", "system", *IMAGE_KEYS, *READERS[form.name].keys}
        keys = dict.fromkeys(itertools.chain.from_iterable(records))
        unread = [name for name in keys if name not in read]
        if unread:
            more = f"; not read: {escape(first_few(unread, 20))}"
    _log.debug(
        f"{key}: format {form.name} (KEY.{suffix}), "
        f"as in {readable} of the first {len(first)} samples{more}"
    )
    if form.name == "caption" and any(first_value(record, QUESTION_KEYS) for record in records):
        _log.warning(
            f"{key}: KEY.json has an unread question; captions answer {asked.caption_prompt!r} "
            "(data.caption_prompt). If an answer is beside it, data.format=qa reads both"
        )
    return form


def _most_frequent(faults: list[BadSample]) -> str:
    """Describe the most frequent of faults, with the detail of its first one."""
    examples = {}
    for fault in faults:
        examples.setdefault(fault.reason, fault.detail)
    reason, count = Counter(fault.reason for fault in faults).most_common(1)[0]
    return f"{count} {reason}: {escape(examples[reason])}"


def _first_samples(shards: Sequence[Tar], key: str) -> list[_Members]:
    samples = []
    damage = None
    for shard in shards:
        try:
            for _, sample in itertools.islice(_samples_of(shard), SEEN - len(samples)):
                samples.append(sample)  # one by one: those before damage count
        except UserError as error:
            damage = damage or error
        except OSError as error:
            raise UserError(f"{key}: {shard} cannot be read ({error.strerror})") from error
        if len(samples) == SEEN:
            break
    if not samples:
        refuse_empty_shards(shards, key)
        raise damage or UserError(
            f"{key}: {shards[0]} holds no file KEY.json, KEY.txt, KEY.jpg, ..."
        )
    return samples


def _refuse_scattered(shard: Tar) -> None:
    """Raise UserError for two samples of one key that share no suffix: they were meant as one."""
    seen = {}
    for key, members in _samples_of(shard):
        earlier = seen.setdefault(key, {})
        if earlier and earlier.keys().isdisjoint(members):
            files = escape(f"{key}.{min(earlier)} and {key}.{min(members)}")
            raise UserError(
                f"{shard}: {files} are not neighbours, so readers take them for two samples. "
                "Write the tar with each sample's files together, for example by tar --sort=name"
            )
        earlier.update(dict.fromkeys(members, b""))


def _samples_of(shard: Tar) -> Iterator[tuple[str, _Members]]:
    """Yield key and members of each sample of a shard.

    Raises UserError, when it gets there, for damage.
    """
    with shard.open("rb") as stream:
        files = (file for file in read_headers(shard, stream) if sample_name(file.name))
        for key, members in itertools.groupby(files, lambda file: sample_name(file.name)[0]):
            sample: _Members = {}
            for file in members:
                _, suffix = sample_name(file.name)
                sample[suffix] = b""
                if suffix in TEXT_SUFFIXES and file.size <= MAX_RECORD_BYTES:
                    stream.seek(file.offset)
                    sample[suffix] = stream.read(file.size)
            yield key, sample

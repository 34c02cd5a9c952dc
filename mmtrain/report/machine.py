"""Sections on the machine: where each rank's time and memory went, beside what was planned."""

from __future__ import annotations

from mmtrain.base.printing import bytes_text
from mmtrain.report.elements import NOT_YET, Bar, BarChart, Section, counted, number, percent, short, table
from mmtrain.report.lines import RankPlan
from mmtrain.report.records import RankTime, RunRecord

SHOWN_RANKS = 64


def rank_times(run: RunRecord) -> Section:
    """Where each rank's time went, and the plan beside it."""
    title = "Where the time went"
    ranks = [(number, rank) for number, rank in enumerate(run.ranks[:SHOWN_RANKS]) if rank.window]
    if not ranks:
        return Section("ranks", title, (NOT_YET if not run.steps else "The steps have no times of ranks.",))
    names = tuple(f"rank {number}" for number, _ in ranks)
    planned = dict(enumerate(run.plan.ranks)) if run.plan else {}
    kinds = ("compute", "communication", "data", "idle")
    bars = [
        Bar(kind, tuple(getattr(rank, kind) / rank.window for _, rank in ranks), "measured", colour)
        for kind, colour in zip(kinds, (0, 3, 4, 7), strict=True)
    ]
    if all(number in planned for number, _ in ranks):
        busy = tuple(1 - planned[number].idle_share for number, _ in ranks)
        bars += [
            Bar("planned: busy", busy, "planned", 2),
            Bar("planned: idle", tuple(1 - share for share in busy), "planned", 6),
        ]
    idle = sum(rank.idle for _, rank in ranks) / sum(rank.window for _, rank in ranks)
    says = [
        f"Over {counted(run.timed_steps, 'step')}, without the first of each process, which pays for warm-up, the "
        f"ranks were idle {percent(idle)} of the time"
        + (f"; planned were {percent(run.plan.idle_share)}." if run.plan else "."),
        "Idle is waiting for other ranks; data is waiting for samples. The optimizer's time is in none of them.",
    ]
    if run.plan and run.plan.step_seconds is None:
        says.append("The plan's costs are assumed, from FLOPs and bytes; mmtrain calibrate measures them.")
    about = f"Shares of each rank's time; idle {', '.join(percent(r.idle / r.window) for _, r in ranks[:8])}."
    chart = BarChart("ranks", "Shares of a step, by rank", about, names, tuple(bars), "share of the time", "share")
    columns = (">rank", *(f">{kind}, s" for kind in kinds), ">idle", ">planned", ">work", ">planned")
    rows = [_time_row(number, rank, run, planned.get(number)) for number, rank in ranks]
    return Section(
        "ranks", title, tuple(says), (chart,), (table("Seconds a step, by rank", columns, rows, folded=True),)
    )


def memory(run: RunRecord) -> Section:
    """Bytes, planned and measured."""
    title = "Memory"
    if run.plan is None:
        return Section("memory", title, ("There is no plan.json that could be read.",))
    planned = run.plan.ranks[:SHOWN_RANKS]
    peaks = [rank.peak_bytes for rank in run.ranks[:SHOWN_RANKS]]
    parts = {
        "weights": "weight_bytes",
        "optimizer": "optimizer_bytes",
        "activations": "activation_bytes",
        "workspace": "workspace_bytes",
    }
    bars = [
        Bar(f"planned: {name}", tuple(float(getattr(rank, key)) for rank in planned), "planned", colour)
        for colour, (name, key) in zip((0, 3, 2, 6), parts.items(), strict=True)
    ]
    says = ["Planned is the fullest moment of each rank."]
    if len(peaks) == len(planned) and any(peaks):
        bars.append(Bar("measured", tuple(peaks), "measured", 1))
        says.append(
            "Measured is the highest of all steps: on a GPU what torch has allocated, on a CPU what the whole process "
            "holds, with Python and its libraries."
        )
    else:
        says.append("Nothing is measured yet.")
    limit = run.plan.memory_limit_bytes
    says.append("No limit was set." if limit is None else f"The limit is {bytes_text(limit)} a rank.")
    most = max(planned, key=lambda rank: rank.total_bytes)
    about = f"The fullest rank as planned is {most.rank}, with {bytes_text(most.total_bytes)}."
    names = tuple(f"rank {rank.rank}" for rank in planned)
    chart = BarChart("memory", "Memory, by rank", about, names, tuple(bars), "bytes", "bytes")
    columns = (">rank", *(f">{name}" for name in parts), ">planned", ">measured")
    rows = [
        (
            str(rank.rank),
            *(bytes_text(getattr(rank, key)) for key in parts.values()),
            bytes_text(rank.total_bytes),
            bytes_text(peaks[place]) if place < len(peaks) and peaks[place] else "-",
        )
        for place, rank in enumerate(planned)
    ]
    return Section("memory", title, tuple(says), (chart,), (table("Memory, by rank", columns, rows, folded=True),))


def _time_row(place: int, rank: RankTime, run: RunRecord, planned: RankPlan | None) -> tuple:
    steps = max(1, run.timed_steps)
    replica = (
        run.ranks
        if run.plan is None
        else [
            run.ranks[r.rank] for r in run.plan.ranks if planned and r.data == planned.data and r.rank < len(run.ranks)
        ]
    )
    work = sum(other.compute for other in replica)
    return (
        str(place),
        *(number(short(getattr(rank, kind) / steps)) for kind in ("compute", "communication", "data", "idle")),
        percent(rank.idle / rank.window),
        percent(planned.idle_share if planned else None),
        percent(rank.compute / work if work else None),
        percent(planned.work_share if planned else None),
    )

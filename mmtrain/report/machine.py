"""Sections on the machine: where each rank's time and memory went, beside what was planned."""

from __future__ import annotations

from mmtrain.base.printing import bytes_text
from mmtrain.report.elements import NOT_YET, SHOWN_RANKS, Bar, BarChart, Section, counted, number, percent, table
from mmtrain.report.records import RunRecord

# kinds of a rank's time, and their colours
TIMES = {"compute": 0, "communication": 1, "data": 4, "fetching": 3, "idle": 6}
PARTS = {  # of a rank's memory as planned, and their colours
    "weight_bytes": ("weights", 0),
    "optimizer_bytes": ("optimizer", 3),
    "activation_bytes": ("activations", 2),
    "workspace_bytes": ("workspace", 4),
}


def rank_times(run: RunRecord) -> Section:
    """Where each rank's time went, and the plan beside it."""
    title = "Where the time went"
    ranks = [(place, rank) for place, rank in enumerate(run.ranks[:SHOWN_RANKS]) if rank.window]
    if not ranks:
        return Section("ranks", title, (NOT_YET if not run.steps else "The steps have no times of ranks.",))
    plan, steps = run.plan, max(1, run.timed_steps)
    planned = {rank.rank: rank for rank in plan.ranks} if plan else {}
    idle = sum(rank.idle for _, rank in ranks) / sum(rank.window for _, rank in ranks)
    beside = f"; planned were {percent(plan.idle_share)}" if plan else ""
    says = [
        f"Over {counted(run.timed_steps, 'step')}, without the first of each process, which pays for warm-up, the "
        f"ranks were idle {percent(idle)} of the time{beside}.",
        "Idle is waiting for other ranks; data is waiting for samples. The optimizer's time is in none of them.",
    ]
    if plan and plan.step_seconds is None:
        says.append("The plan's costs are assumed, from FLOPs and bytes; mmtrain calibrate measures them.")
    streams = any(rank.fetching for _, rank in ranks)
    if streams:
        says.append("Fetching is waiting for weights of layers that are not kept on the device.")
    kinds = [kind for kind in TIMES if streams or kind != "fetching"]
    bars = [
        Bar(kind, tuple(getattr(rank, kind) / rank.window for _, rank in ranks), "measured", TIMES[kind])
        for kind in kinds
    ]
    rows = []
    for place, rank in ranks:
        mine = planned.get(place)
        replica = [r for other, r in ranks if other not in planned or (mine and planned[other].data == mine.data)]
        work = sum(r.compute for r in replica)
        rows.append(
            (
                str(place),
                *(getattr(rank, kind) / steps for kind in kinds),
                *(percent(rank.idle / rank.window), percent(mine.idle_share if mine else None)),
                *(percent(rank.compute / work if work else None), percent(mine.work_share if mine else None)),
            )
        )
    if all(place in planned for place, _ in ranks):
        busy = tuple(1 - planned[place].idle_share for place, _ in ranks)
        bars += [Bar("planned: busy", busy, "planned", 5)]
        bars += [Bar("planned: idle", tuple(1 - share for share in busy), "planned", 6)]
    columns = (">rank", *(f">{kind}, s" for kind in kinds), ">idle", ">planned", ">work", ">planned")
    caption = "Seconds a step, shares of the time idle and of a replica's work, by rank"
    chart = BarChart(
        id="ranks",
        title="Shares of the time, by rank",
        about=f"Each rank's time in shares; idle {', '.join(percent(r.idle / r.window) for _, r in ranks[:8])}.",
        rows=tuple(f"rank {place}" for place, _ in ranks),
        bars=tuple(bars),
        x_name="share of the time",
        x_unit="share",
        behind=table(caption, columns, rows),
    )
    return Section("ranks", title, tuple(says), (chart,))


def memory(run: RunRecord) -> Section:
    """Bytes, planned and measured."""
    title = "Memory"
    if run.plan is None:
        return Section("memory", title, ("There is no plan.json that could be read.",))
    planned = run.plan.ranks[:SHOWN_RANKS]
    peaks = {place: rank.peak_bytes for place, rank in enumerate(run.ranks) if rank.peak_bytes}
    measured = tuple(peaks.get(rank.rank, 0.0) for rank in planned)
    largest = max(*measured, *(rank.total_bytes for rank in planned))
    unit, name = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    bars = [
        Bar(f"planned: {part}", tuple(getattr(rank, key) / unit for rank in planned), "planned", colour)
        for key, (part, colour) in PARTS.items()
    ]
    limit = run.plan.memory_limit_bytes
    says = ["Planned is the fullest moment of each rank."]
    says.append("No limit was set." if limit is None else f"The limit is {bytes_text(limit)} a rank.")
    if any(measured):
        bars.append(Bar("measured", tuple(size / unit for size in measured), "measured", 1))
        says.append(
            "Measured is the highest of all steps: on a GPU what torch has allocated, on a CPU what the whole process "
            "holds, with Python and its libraries."
        )
    else:
        says.append("Nothing is measured yet.")
    most = max(planned, key=lambda rank: rank.total_bytes)
    rows = [
        (
            str(rank.rank),
            *(number(getattr(rank, key) / unit) for key in (*PARTS, "total_bytes")),
            number(peak / unit) if peak else "-",
        )
        for rank, peak in zip(planned, measured, strict=True)
    ]
    columns = (">rank", *(f">{part}" for part, _ in PARTS.values()), ">planned", ">measured")
    chart = BarChart(
        id="memory",
        title="Memory, by rank",
        about=f"The fullest rank as planned is {most.rank}, with {bytes_text(most.total_bytes)}.",
        rows=tuple(f"rank {rank.rank}" for rank in planned),
        bars=tuple(bars),
        x_name=name,
        behind=table(f"Memory in {name}, by rank", columns, rows),
    )
    return Section("memory", title, tuple(says), (chart,))

"""The schedules, and which one a call prefers."""

from __future__ import annotations

from liger_cutedsl.schedules import liger_triton, recompute, sampled, single_pass
from liger_cutedsl.schedules.schedule import Schedule

IN_ORDER_OF_PREFERENCE: tuple[Schedule, ...] = (sampled, single_pass, recompute)


_BY_NAME = {schedule.NAME: schedule for schedule in (*IN_ORDER_OF_PREFERENCE, liger_triton)}


def by_name(name: str) -> Schedule:
    """One of those, or what Liger-Kernel's operator does by itself."""
    return _BY_NAME[name]

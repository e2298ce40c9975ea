"""Schedules: in what order tiles and chunks are computed, written once for all engines."""

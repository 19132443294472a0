"""Pipelines: stages, schedules as data, and what runs them."""

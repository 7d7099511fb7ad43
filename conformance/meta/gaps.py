"""Mutants that the harness cannot catch yet, each with what is missing. An empty list is the aim."""

from __future__ import annotations

GAPS: dict[str, str] = {}

"""Random sequences on mlximpl beside the reference and the ledger.

The verb `run` tries thousands; these few show in seconds that all agree, and that a run can be had again.
"""

from __future__ import annotations

import pytest

from conformance.adapters.registry import make_adapter
from conformance.machine import Campaign, explore
from conformance.operations import KINDS

SEED = 2026


def campaign_of(kind: str, sequences: int, seed: int = SEED) -> Campaign:
    """What that many sequences on one kind found and reached."""
    campaign = Campaign([make_adapter("reference"), make_adapter("mlximpl")])
    explore(campaign, kind, sequences, seed)
    return campaign


@pytest.mark.parametrize("kind", KINDS)
def test_random_sequences_find_nothing(kind: str) -> None:
    campaign = campaign_of(kind, 120)
    assert [found.sentence() for found, _ in campaign.findings.values()] == []
    assert campaign.tally.sequences >= 120  # those that Hypothesis gives up half-way come on top
    assert campaign.tally.operations > 120 * 4
    assert campaign.tally.done[kind, "update"] > 120


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_seed_gives_the_same_tally(kind: str) -> None:
    assert campaign_of(kind, 8).tally == campaign_of(kind, 8).tally


def test_another_seed_gives_other_sequences() -> None:
    assert campaign_of("KVCache", 8).tally != campaign_of("KVCache", 8, SEED + 1).tally

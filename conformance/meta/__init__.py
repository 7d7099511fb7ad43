"""The harness, tested: broken implementations that it must catch."""

"""One adapter an implementation."""

"""The conformance harness: see README.md beside this file."""

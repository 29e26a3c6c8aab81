"""Tests of the three packages; see docs/contribute/testing.md."""

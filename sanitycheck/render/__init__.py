"""Showing a report: text for people, JSON for programs, from the same object."""

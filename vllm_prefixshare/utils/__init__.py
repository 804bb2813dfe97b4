"""Helpers without attention logic."""

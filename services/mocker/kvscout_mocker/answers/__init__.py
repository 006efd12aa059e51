"""Answers, written."""

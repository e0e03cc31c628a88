"""Tests, and the fakes they share."""

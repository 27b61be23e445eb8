"""Tests of the fix: finding, rewriting, journaling and running it."""

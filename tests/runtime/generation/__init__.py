"""Tests of generating tokens."""

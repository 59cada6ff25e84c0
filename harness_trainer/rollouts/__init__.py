"""Rollouts: run agents on tasks in groups, score them, and keep what they came to."""

"""Trainings killed at any moment, and what has to be the same afterwards."""

"""Trainings of several variants and seeds, and what their models were measured to do."""

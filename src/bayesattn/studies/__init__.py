"""What we measure with: one folder a study, each with run.py (settings, rows, run) and show.py."""

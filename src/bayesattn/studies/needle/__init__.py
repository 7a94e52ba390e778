"""The tasks of RULER: needles among needles, chains of variables, common words."""

"""What each operator computes and moves: one file for each kind of work, each with a table ``FORMULAS``."""

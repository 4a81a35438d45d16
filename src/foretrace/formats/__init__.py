"""Doors: files <-> nouns. A trace file is read here and nowhere else."""

from foretrace.formats.read import read

__all__ = ["read"]

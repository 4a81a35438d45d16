"""The folder that ``foretrace capture`` puts on the path of the programs it runs."""

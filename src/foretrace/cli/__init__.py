"""The words a person types: ``foretrace info|analyze|diff``. No analysis happens here."""

from foretrace.cli.main import main

__all__ = ["main"]

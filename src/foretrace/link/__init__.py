"""From timelines to execution graphs: find or infer what waited for what."""

from foretrace.link.graph import link

__all__ = ["link"]

"""Read-only questions to a `Job`."""

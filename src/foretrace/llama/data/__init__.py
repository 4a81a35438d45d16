"""Text as tokens, and tokens as rows of a batch."""

"""What hardware does: the cost of an operator from its shapes."""

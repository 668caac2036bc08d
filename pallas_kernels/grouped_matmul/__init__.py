"""Matrix product of consecutive row groups, each with its own matrix."""

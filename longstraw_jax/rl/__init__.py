"""Group-relative policy optimisation as functions of arrays."""

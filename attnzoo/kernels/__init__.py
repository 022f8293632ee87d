"""Plain functions (q, k, v, scope) -> heads: `dense` defines what is right, the others are faster."""
